"""The Trainer's own options mean what they mean everywhere in Lightning; a resumed run is the unbroken run, bitwise."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightrl import RLModule, RolloutDataModule
from lightrl.packing import StepBatch
from lightrl.policy import load_policy
from tests.helpers.tiny import save_tiny, tiny_model, tiny_prompts
from tests.helpers.training import equal, quiet_trainer, reward_even, tiny_data, tiny_module, weights


class Watch(Callback):
    def __init__(self) -> None:
        self.steps: list[StepBatch] = []
        self.validations = 0
        self.validated = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: StepBatch, batch_idx: int) -> None:
        self.steps.append(batch)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.validations += 1

    def on_validation_batch_end(self, *_: Any) -> None:
        self.validated += 1

    @property
    def sampled(self) -> list[list[list[int]]]:
        return [[r.token_ids.tolist() for r in s.rollouts] for s in self.steps]


class SGDModule(RLModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.policy.parameters(), lr=1.0)


def fit(data: Any = None, module: Any = None, ckpt_path: Any = None, **args: Any) -> tuple[Watch, Any, RLModule]:
    watch, module = Watch(), module or tiny_module()
    trainer = quiet_trainer(**{"callbacks": []} | args)
    trainer.callbacks.append(watch)
    trainer.fit(module, data or tiny_data(), ckpt_path=ckpt_path)
    return watch, trainer, module


VALIDATING = {"val_prompts": tiny_prompts(3), "val_batch_size": 1}


def test_fast_dev_run() -> None:
    watch, trainer, _ = fit(tiny_data(**VALIDATING), fast_dev_run=True)
    assert (trainer.global_step, len(watch.steps), watch.validated) == (1, 1, 1)


def test_limits_of_batches() -> None:
    watch, trainer, _ = fit(tiny_data(**VALIDATING), limit_val_batches=2, limit_train_batches=3, max_epochs=2)
    assert (trainer.global_step, watch.validations, watch.validated) == (6, 2, 4)


@pytest.mark.parametrize(("length", "steps"), [({"max_steps": 5}, 5), ({"max_epochs": 2}, 6), ({"max_steps": 0}, 0)])
def test_length_of_a_run(length: dict[str, int], steps: int) -> None:
    watch, trainer, _ = fit(tiny_data(tiny_prompts(7)), **length)
    assert trainer.global_step == len(watch.steps) == steps


def test_validation_changes_nothing_in_training() -> None:
    """Neither the sanity check, nor validation in the middle of reused rollouts."""
    reuse = {"minibatches_per_rollout": 3, "group_size": 3}
    plain, _, module = fit(tiny_data(**reuse), max_steps=5)
    quiet, trainer, sane = fit(tiny_data(**reuse, **VALIDATING), max_steps=5, num_sanity_val_steps=2)
    assert (quiet.validations, quiet.validated) == (1, 2)
    often, _, validated = fit(
        tiny_data(**reuse, **VALIDATING), max_steps=5, val_check_interval=2, check_val_every_n_epoch=None
    )
    assert often.validations == 2
    assert plain.sampled == quiet.sampled == often.sampled
    assert equal(weights(module.policy), weights(sane.policy))
    assert equal(weights(module.policy), weights(validated.policy))


def test_validate_alone_and_after_fit_use_the_present_weights() -> None:
    def one(completion: str, answer: str) -> float:
        return 1.0

    data, module = tiny_data(reward=one, **VALIDATING), tiny_module()
    assert quiet_trainer().validate(module, data, verbose=False) == [{"val/reward": 1.0, "val/pass@1": 1.0}]
    assert equal(weights(module.policy), weights(tiny_model()))


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return sum(float((a[n] - b[n]).double().pow(2).sum()) for n in a) ** 0.5


@pytest.mark.parametrize("clip", [None, 0.01, -1.0])
def test_gradient_clip_val(clip: float | None) -> None:
    """With SGD at a learning rate of 1 the step is the gradient."""
    data = tiny_data(group_size=4, max_completion_tokens=6, max_tokens_per_micro_batch=14)
    watch, trainer, module = fit(data, SGDModule(tiny_model()), max_steps=1, gradient_clip_val=clip)
    assert len(watch.steps[0].micro) > 1
    applied = distance(weights(module.policy), weights(tiny_model()))
    before = float(trainer.callback_metrics["train/grad_norm"])
    assert before > 0.05, "too small to be clipped"
    assert applied == pytest.approx(clip if clip == 0.01 else before, rel=1e-3)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)]
)
def test_precision(precision: Any, dtype: torch.dtype) -> None:
    computed: list[torch.dtype] = []
    module = tiny_module(kl_coef=0.1)
    module.configure_model()
    module.policy.model.layers[0].mlp.register_forward_hook(lambda m, x, y: computed.append(y.dtype))
    watch, trainer, _ = fit(module=module, max_steps=2, precision=precision)
    assert {p.dtype for p in module.policy.parameters()} == {dtype}
    assert set(computed) == {torch.float32 if precision == "32-true" else torch.bfloat16}
    assert watch.steps[0].micro[0].ref_logprobs is not None
    assert watch.steps[0].micro[0].ref_logprobs.dtype == torch.float32
    assert trainer.callback_metrics["train/loss"].isfinite()
    assert distance(weights(module.policy), weights(tiny_model().to(dtype))) > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "16-true"}, "precision='16-true' is not supported"),
        ({"precision": "64-true"}, "precision='64-true' is not supported"),
        ({"accumulate_grad_batches": 4}, "accumulate_grad_batches=4"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(max_steps=1, **options)


# -- checkpoints ------------------------------------------------------------------------------------------------------

REUSE = {"minibatches_per_rollout": 3, "epochs_per_rollout": 2, "group_size": 2}


def saving(folder: Path, every: int) -> dict[str, Any]:
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    return {"callbacks": [save], "enable_checkpointing": True}


def scheduled() -> RLModule:
    return tiny_module(lr=1e-2, warmup_steps=2, schedule="cosine", weight_decay=0.1)


@pytest.mark.parametrize(("settings", "at", "steps"), [({}, 2, 4), ({}, 3, 6), (REUSE, 2, 7), (REUSE, 6, 8)], ids=str)
def test_b42_a_resumed_run_is_the_unbroken_one(settings: dict[str, Any], at: int, steps: int, tmp_path: Path) -> None:
    prompts = tiny_prompts(5)
    whole, _, module = fit(tiny_data(prompts, **settings), scheduled(), max_steps=steps, **saving(tmp_path, at))
    torch.rand(3)  # another process is at another place of its random stream
    rest, trainer, resumed = fit(
        tiny_data(prompts, **settings), scheduled(), max_steps=steps, ckpt_path=tmp_path / f"step={at}.ckpt"
    )
    assert trainer.global_step == steps
    assert rest.sampled == whole.sampled[at:], "a prompt twice, or one skipped"
    assert [s.policy_version for s in rest.steps] == [s.policy_version for s in whole.steps[at:]]
    assert equal(weights(resumed.policy), weights(module.policy))


def test_b42_every_prompt_once_over_a_broken_epoch(tmp_path: Path) -> None:
    prompts = tiny_prompts(8)
    first, _, _ = fit(tiny_data(prompts, prompts_per_step=1), max_steps=4, **saving(tmp_path, 3))
    rest, _, _ = fit(tiny_data(prompts, prompts_per_step=1), max_epochs=1, ckpt_path=tmp_path / "step=3.ckpt")
    used = [tuple(s.rollouts[0].prompt_ids) for s in first.steps[:3] + rest.steps]
    assert len(used) == len(set(used)) == 8


def test_resuming_with_other_data_is_an_error(tmp_path: Path) -> None:
    fit(max_steps=1, **saving(tmp_path, 1))
    with pytest.raises(ValueError, match="8 prompts and the data set now has 5"):
        fit(tiny_data(tiny_prompts(5)), max_steps=2, ckpt_path=tmp_path / "step=1.ckpt")


@pytest.mark.parametrize("model", ["folder", "object"])
def test_b44_a_checkpoint_holds_the_policy_only(model: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")

    def make() -> RLModule:
        return RLModule(folder if model == "folder" else tiny_model(), lr=1e-2, kl_coef=0.1)

    _, _, module = fit(tiny_data(**REUSE), make(), max_steps=2, **saving(tmp_path, 2))
    path = tmp_path / "step=2.ckpt"
    found = torch.load(path, weights_only=True)
    policy = {f"policy.{name}" for name in tiny_model().state_dict()}
    assert set(found["state_dict"]) == policy
    parameters = sum(p.numel() for p in tiny_model().parameters())
    assert path.stat().st_size < 4 * parameters * 3.2 + 500_000, "more than policy and two moments of Adam"
    assert len(found["optimizer_states"][0]["state"]) == len(list(tiny_model().parameters()))

    resumed = make()
    watch, trainer, _ = fit(tiny_data(**REUSE), resumed, max_steps=3, ckpt_path=path)
    assert trainer.global_step == 3
    assert resumed.reference is not None
    assert equal(weights(resumed.reference), weights(load_policy(folder)))
    assert not equal(weights(resumed.policy), weights(load_policy(folder)))
    assert float(trainer.callback_metrics["kl/ref"]) > 1e-6


def test_b44_a_missing_policy_key_is_named(tmp_path: Path) -> None:
    fit(max_steps=1, **saving(tmp_path, 1))
    path = tmp_path / "step=1.ckpt"
    found = torch.load(path, weights_only=True)
    del found["state_dict"]["policy.model.norm.weight"]
    torch.save(found, path)
    with pytest.raises(ValueError, match=r"does not fit this module: .*policy\.model\.norm\.weight"):
        fit(max_steps=2, ckpt_path=path)


def test_b37_validating_a_checkpoint_uses_its_weights(tmp_path: Path) -> None:
    seen: list[str] = []

    def reward(completion: str) -> float:
        seen.append(completion)
        return reward_even(completion)

    data = tiny_data(reward=reward, val_prompts=tiny_prompts(8), val_temperature=1.0, max_completion_tokens=8)
    _, _, module = fit(data, tiny_module(lr=0.02), max_steps=2, limit_val_batches=0, **saving(tmp_path, 2))
    found = []
    for ckpt, start in (("step=2.ckpt", tiny_module()), (None, module), (None, tiny_module())):
        seen.clear()
        path = tmp_path / ckpt if ckpt else None
        quiet_trainer().validate(start, data, ckpt_path=path, verbose=False)
        found.append(list(seen))
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_a_datamodule_without_training_prompts_loads_any_position(tmp_path: Path) -> None:
    fit(max_steps=1, **saving(tmp_path, 1))
    data = RolloutDataModule(None, len, val_prompts=["w5"], tokenizer=tiny_data().tokenizer, max_completion_tokens=2)
    (logged,) = quiet_trainer().validate(tiny_module(), data, ckpt_path=tmp_path / "step=1.ckpt", verbose=False)
    assert logged["val/reward"] >= 0
