"""LoRA and PPO with the real vLLM on one rank and on two: what is pushed, sharded, saved and loaded."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightrl import RLModule
from lightrl.algorithms import PPO
from lightrl.distributed import rank
from lightrl.lora import is_adapter
from lightrl.strategies import ColocatedHFStrategy, ColocatedVLLMStrategy
from lightrl.weights.source import iter_weights
from tests.helpers.fits import BAR, quiet_trainer, tiny_data
from tests.helpers.tiny import tiny_model, tiny_prompts
from tests.helpers.training import equal, weights

pytest.importorskip("peft")

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 16}
HEADS = LORA | {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}
STEPS = 3


class Gaps(Callback):
    """Largest |difference| between the sampler's logprobs and the policy's own, whose adapters are not merged."""

    def __init__(self) -> None:
        self.gaps: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            gaps = [(module(m) - m.rollout_logprobs)[m.loss_mask].abs().max() for m in batch.micro if m.loss_mask.any()]
        self.gaps.append(max(map(float, gaps)))


class SGD:
    """Adam would blow rounding up wherever a gradient is nearly nothing."""

    policy: Any

    def companions(self) -> list[Any]:
        return []

    def configure_optimizers(self) -> Any:
        trained = [p for m in (self.policy, *self.companions()) for p in m.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.3)


class SGDModule(SGD, RLModule):
    pass


class SGDPPO(SGD, PPO):
    pass


# -- one rank ---------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize(("lora", "tied"), [(LORA, True), (HEADS, False)], ids=["linear, tied", "heads, untied"])
def test_b36_the_engine_holds_base_and_adapters_and_the_base_stays(lora: dict[str, Any], tied: bool) -> None:
    module, gaps = RLModule(tiny_model(tied=tied), lora=lora, lr=0.02, kl_coef=0.01), Gaps()
    quiet_trainer(callbacks=[gaps], max_steps=4).fit(module, tiny_data())
    assert len(gaps.gaps) == 4
    assert max(gaps.gaps) < BAR
    start = weights(tiny_model(tied=tied))
    base = {n.replace("base_layer.", ""): t for n, t in weights(module.policy).items() if not is_adapter(n)}
    assert equal(base, start)
    pushed = dict(iter_weights(module.policy, torch.float32))
    assert (
        pushed["model.layers.0.self_attn.q_proj.weight"] - start["model.layers.0.self_attn.q_proj.weight"]
    ).norm() > 1


@pytest.mark.vllm
@pytest.mark.parametrize("args", [{"quantization": "fp8"}, {"enable_lora": True}], ids=str)
def test_engines_that_cannot_take_merged_weights_are_refused(args: dict[str, Any]) -> None:
    ((name, _),) = args.items()
    trainer = quiet_trainer(ColocatedVLLMStrategy(engine_args=args), max_steps=1)
    with pytest.raises(ValueError, match=f"engine_args=.*{name}.*with lora"):
        trainer.fit(RLModule(tiny_model(), lora=LORA), tiny_data())


# -- two ranks --------------------------------------------------------------------------------------------------------

RUNS: dict[str, Any] = {
    "lora critic": lambda: SGDPPO(tiny_model(), lora=LORA, kl_coef=0.01),
    "lora heads": lambda: SGDModule(tiny_model(tied=False), lora=HEADS, ref_refresh_every=2, kl_coef=0.01),
    "offloaded reference": lambda: SGDModule(tiny_model(), kl_coef=0.01, reference_device="cpu", ref_refresh_every=2),
    "own critic": lambda: SGDPPO(tiny_model(), critic="own", gradient_checkpointing=True),
}


def few_steps(name: str, strategy: Any, devices: int, folder: str = "", **args: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module, gaps = RUNS[name](), Gaps()
    save = [ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename=name)] if folder else []
    trainer = quiet_trainer(
        strategy, devices=devices, callbacks=[gaps, *save], max_steps=STEPS, enable_checkpointing=bool(folder)
    )
    trainer.fit(module, tiny_data(tiny_prompts(12), deterministic=True), **args)
    found = dict(iter_weights(module.policy, torch.float32)) | {
        f"{i}.{n}": t for i, m in enumerate(module.companions()) for n, t in weights(m).items()
    }
    return {"gaps": gaps.gaps, "weights": found, "kl": float(trainer.callback_metrics.get("kl/ref", -1.0))}


def two_ranks_main(folder: str) -> None:
    made: dict[str, Any] = {"vllm": few_steps("lora heads", ColocatedVLLMStrategy(), 2)}
    for name in RUNS:
        made[name] = few_steps(name, ColocatedHFStrategy(), 2, folder)
        made[f"{name}, resumed"] = few_steps(name, ColocatedHFStrategy(), 2, ckpt_path=f"{folder}/{name}.ckpt")
    torch.save(made, Path(folder) / f"{rank()}.pt")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two_ranks")
    command = [sys.executable, "-m", "tests.strategies.test_lora_and_critics", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in (0, 1)]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_two_ranks_push_the_same_merged_weights(seen: list[dict[str, Any]]) -> None:
    for on_rank in seen:
        assert len(on_rank["vllm"]["gaps"]) == STEPS
        assert max(on_rank["vllm"]["gaps"]) < BAR
    assert equal(seen[0]["vllm"]["weights"], seen[1]["vllm"]["weights"])


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_do_what_one_does_and_resume(seen: list[dict[str, Any]], name: str) -> None:
    alone = few_steps(name, ColocatedHFStrategy(), 1)
    first, second, resumed = seen[0][name], seen[1][name], seen[0][f"{name}, resumed"]
    assert max(first["gaps"]) < BAR
    assert equal(first["weights"], second["weights"])
    assert equal(first["weights"], resumed["weights"])
    assert first["kl"] == resumed["kl"] == pytest.approx(alone["kl"], rel=1e-3, abs=1e-7)
    assert first["weights"].keys() == alone["weights"].keys()
    for parameter, right in alone["weights"].items():
        torch.testing.assert_close(first["weights"][parameter], right, rtol=1e-5, atol=1e-5)
    start = weights(tiny_model(tied=name != "lora heads"))
    assert any((first["weights"][n] - t).abs().max() > 1e-3 for n, t in start.items())


if __name__ == "__main__":
    two_ranks_main(sys.argv[1])
