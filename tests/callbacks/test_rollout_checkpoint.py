"""The newest checkpoints are kept, found, small, and go on where an unbroken run would be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightrl import RLModule, Trainer
from lightrl.callbacks import RolloutCheckpoint
from tests.helpers.tiny import save_tiny, tiny_model, tiny_prompts
from tests.helpers.training import equal, quiet_trainer, tiny_data, tiny_module, weights

pytestmark = pytest.mark.slow


def fit(folder: Path, steps: int, module: Any = None, every: int = 2, ckpt: Any = None, **args: Any) -> RLModule:
    module = module or tiny_module()
    saving = RolloutCheckpoint(folder, every_n_steps=every)
    trainer = quiet_trainer(max_steps=steps, callbacks=[saving], enable_checkpointing=True, **args)
    trainer.fit(module, tiny_data(tiny_prompts(12)), ckpt_path=ckpt)
    return module


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_last_two_and_the_end_are_kept_also_over_a_resume(tmp_path: Path) -> None:
    unbroken = fit(tmp_path / "a", 7)
    assert names(tmp_path / "a") == ["step=6.ckpt", "step=7.ckpt"]
    fit(tmp_path / "b", 5)
    assert names(tmp_path / "b") == ["step=4.ckpt", "step=5.ckpt"]
    resumed = fit(tmp_path / "b", 7, ckpt="last")
    assert names(tmp_path / "b") == ["step=6.ckpt", "step=7.ckpt"]
    assert equal(weights(resumed.policy), weights(unbroken.policy))


def test_what_a_checkpoint_overrules_or_does_not_fit_is_said(tmp_path: Path) -> None:
    fit(tmp_path / "a", 2, RLModule(tiny_model(), lr=1e-3))
    with pytest.warns(UserWarning, match=r"lr=5e-05 has no effect: the checkpoint's optimizer goes on with 0\.001"):
        resumed = fit(tmp_path / "a", 3, RLModule(tiny_model(), lr=5e-5), ckpt="last")
    assert resumed.optimizers().param_groups[0]["lr"] == 1e-3  # type: ignore[union-attr]
    fit(tmp_path / "b", 1, RLModule(tiny_model(), lora={"r": 2}))
    with pytest.raises(ValueError, match=r"does not fit this module: .* saved with another `model`, `lora`"):
        fit(tmp_path / "b", 2, RLModule(tiny_model()), ckpt="last")


def test_a_step_is_saved_once_and_a_signal_saves_what_is_not(tmp_path: Path) -> None:
    saved: list[str] = []

    class Told(Callback):
        def on_train_end(self, trainer: Trainer, *_: Any) -> None:
            saving.on_train_end(trainer, trainer.lightning_module)
            before = (tmp_path / "step=3.ckpt").stat().st_ino
            saved.append(saving.save_now(trainer))
            assert (tmp_path / "step=3.ckpt").stat().st_ino == before
            saving._last_global_step_saved = 2
            saved.append(saving.save_now(trainer))
            assert (tmp_path / "step=3.ckpt").stat().st_ino != before

    saving = RolloutCheckpoint(tmp_path, every_n_steps=2)
    trainer = quiet_trainer(max_steps=3, callbacks=[saving, Told()], enable_checkpointing=True)
    trainer.fit(tiny_module(), tiny_data(tiny_prompts(12)))
    assert saved == [str(tmp_path / "step=3.ckpt")] * 2


def test_another_run_with_the_same_callback_is_saved_too_and_removes_nothing_of_the_first(tmp_path: Path) -> None:
    saving = RolloutCheckpoint(tmp_path, every_n_steps=2, keep_last=1)
    last = {}
    for steps, lr in ((5, 1e-3), (3, 1e-3), (3, 1e-2)):
        trainer = quiet_trainer(max_steps=steps, callbacks=[saving], enable_checkpointing=True)
        module = tiny_module(lr=lr)
        trainer.fit(module, tiny_data(tiny_prompts(12)))
        last[steps] = weights(module.policy)
    assert names(tmp_path) == ["step=3.ckpt", "step=5.ckpt"]
    for steps, expected in last.items():
        loaded = RLModule.load_from_checkpoint(tmp_path / f"step={steps}.ckpt", model=tiny_model())
        assert equal(weights(loaded.policy), expected)


def test_saving_in_the_background_ends_with_the_same_files(tmp_path: Path) -> None:
    from lightrl.strategies import ColocatedHFStrategy

    fit(tmp_path / "a", 5)
    fit(tmp_path / "b", 5, strategy=ColocatedHFStrategy(save_in_background=True))
    assert names(tmp_path / "b") == names(tmp_path / "a")
    for name in names(tmp_path / "a"):
        a, b = (torch.load(tmp_path / f / name, weights_only=True)["state_dict"] for f in "ab")
        assert equal(a, b)


def test_b44_a_reference_adds_nothing_to_a_checkpoint(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    sizes = []
    for name, kl_coef in {"without": 0.0, "with": 0.1}.items():
        fit(tmp_path / name, 1, RLModule(model, kl_coef=kl_coef))
        sizes.append((tmp_path / name / "step=1.ckpt").stat().st_size)
    assert sizes[1] < 1.02 * sizes[0]


def test_a_checkpoint_at_the_end_of_an_epoch_goes_on_with_the_next(tmp_path: Path) -> None:
    unbroken = fit(tmp_path / "a", 9, max_epochs=None)
    fit(tmp_path / "b", 6, every=6)  # twelve prompts, two a step
    resumed = fit(tmp_path / "b", 9, ckpt="last", num_sanity_val_steps=2)
    assert equal(weights(resumed.policy), weights(unbroken.policy))


@pytest.mark.parametrize("args", [{"every_n_steps": 0}, {"keep_last": 0}])
def test_bad_arguments_are_refused(args: dict[str, int]) -> None:
    (name,) = args
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        RolloutCheckpoint(**args)  # type: ignore[arg-type]
