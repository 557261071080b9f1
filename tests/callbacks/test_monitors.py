"""What the monitors log of real runs, against the same computed by hand, and what they make of a run that drifts."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightrl import RLModule
from lightrl.callbacks import AdaptiveKL, KLMonitor, StalenessMonitor, ThroughputMonitor
from lightrl.callbacks.staleness_monitor import ages
from lightrl.floors import STAGES, generation_bytes, heads_width, training_flops
from lightrl.memory import model_size
from lightrl.packing import StepBatch, pack
from lightrl.strategies import ColocatedHFStrategy
from lightrl.types import Rollout
from tests.helpers.tiny import tiny_model
from tests.helpers.training import equal, quiet_trainer, tiny_data, tiny_module, weights


class Logged(Callback):
    """Every step's rollouts and metrics; last in the list of callbacks."""

    def __init__(self) -> None:
        self.rollouts: list[list[Rollout]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rollouts.append(batch.rollouts)
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def of(self, name: str) -> list[float]:
        return [metrics[name] for metrics in self.metrics]


def fit(*callbacks: Callback, module: Any = None, data: Any = None, **args: Any) -> tuple[Logged, Any, RLModule]:
    logged, module = Logged(), module or tiny_module()
    trainer = quiet_trainer(callbacks=[*callbacks, logged], **{"max_steps": 4} | args)
    trainer.fit(module, data or tiny_data(minibatches_per_rollout=2, group_size=3))
    return logged, trainer, module


# -- KLMonitor --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_the_kl_to_a_reference_that_the_loss_does_not_use(lora: Any) -> None:
    if lora:
        pytest.importorskip("peft")
    plain = fit(module=tiny_module(lora=lora))[2]
    logged, _, module = fit(KLMonitor(reference=True), module=tiny_module(lora=lora))
    assert equal(weights(plain.policy), weights(module.policy)), "watching changed the training"
    for rollouts, metrics in zip(logged.rollouts, logged.metrics, strict=True):
        gaps = [r.old_logprobs - r.ref_logprobs for r in rollouts]
        assert metrics["kl/ref_k1"] == pytest.approx(float(torch.cat(gaps).mean()), abs=1e-6)
        assert metrics["kl/ref_per_completion"] == pytest.approx(
            sum(float(g.sum()) for g in gaps) / len(gaps), abs=1e-6
        )
    assert logged.of("kl/ref_k1")[0] == pytest.approx(0, abs=1e-6)
    assert logged.of("kl/ref_k1")[2] != 0
    assert logged.of("kl/ref")[3] > 0


def test_a_run_that_leaves_its_reference_ends() -> None:
    with pytest.warns(UserWarning, match=r"kl/ref is 0\.\d+ at step 2, above 1e-06: the run ends here"):
        logged, trainer, _ = fit(KLMonitor(stop_above=1e-6), module=tiny_module(kl_coef=0.1, lr=1e-2))
    assert trainer.global_step == len(logged.metrics) == 2


class Drifted(ColocatedHFStrategy):
    """An engine that does not hold the policy: it says other logprobs than it sampled from."""

    def generate(self, prompts: Any, sampling: Any) -> Any:
        groups = super().generate(prompts, sampling)
        for completion in (c for group in groups for c in group):
            completion.logprobs = completion.logprobs - 0.5
        return groups


def test_a_run_whose_engine_is_off_ends() -> None:
    with pytest.warns(UserWarning, match="kl/mismatch is .* at step 1, above 0.01"):
        _, trainer, _ = fit(KLMonitor(stop_mismatch_above=0.01), strategy=Drifted())
    assert trainer.global_step == 1
    assert fit(KLMonitor(stop_mismatch_above=0.01))[1].global_step == 4


def test_a_bound_needs_a_reference_and_a_reference_its_time() -> None:
    with pytest.raises(ValueError, match="stop_above=0.1 without a reference"):
        fit(KLMonitor(stop_above=0.1))
    with pytest.raises(ValueError, match="stop_above=-1"):
        KLMonitor(stop_above=-1)
    module = fit()[2]
    with pytest.raises(ValueError, match="set up without a reference"):
        fit(KLMonitor(reference=True), module=module)


# -- AdaptiveKL -------------------------------------------------------------------------------------------------------


def test_the_coefficient_seeks_its_target_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    def run(steps: int, **args: Any) -> Logged:
        adaptive, data = AdaptiveKL(target=1e-3, rate=0.5), tiny_data(minibatches_per_rollout=2)
        save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        logged = Logged()
        trainer = quiet_trainer(max_steps=steps, callbacks=[adaptive, logged, save], enable_checkpointing=True)
        trainer.fit(tiny_module(kl_coef=0.1, lr=1e-2), data, **args)
        return logged

    whole = run(6)
    coefficient, changes = 0.1, []
    for i, found in enumerate(whole.of("kl/ref")):
        if i % 2 == 0:  # new rollouts
            coefficient *= 1 + 0.5 * max(-0.2, min(0.2, found / 1e-3 - 1))
            changes.append(coefficient)
        assert whole.of("kl/coef")[i] == pytest.approx(coefficient, rel=1e-6)
    assert changes[0] == pytest.approx(0.09), "there is no KL yet"
    assert changes[-1] > changes[0], "and then too much"
    resumed = run(6, ckpt_path=tmp_path / "step=3.ckpt")
    assert resumed.of("kl/coef") == whole.of("kl/coef")[3:]
    assert resumed.of("train/loss") == whole.of("train/loss")[3:]


def test_the_coefficient_stays_where_a_step_has_no_live_token() -> None:
    def abstains(completions: list[str]) -> list[float | None]:
        batches.append(len(completions))
        return [float(i) if len(batches) < 3 else None for i in range(len(completions))]

    batches: list[int] = []
    logged = Logged()
    trainer = quiet_trainer(max_steps=4, callbacks=[AdaptiveKL(target=1e-6, rate=0.5), logged])
    trainer.fit(tiny_module(kl_coef=0.1, lr=1e-2), tiny_data(reward=abstains))
    found = logged.of("kl/coef")
    assert found[0] < found[1] == found[2] == found[3]


@pytest.mark.parametrize(
    ("arguments", "message"), [({"target": 0.0}, "target=0.0 must be above 0"), ({"target": 1, "rate": 2}, "rate=2")]
)
def test_adaptive_kl_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveKL(**arguments)
    with pytest.raises(ValueError, match="AdaptiveKL with kl_coef=0"):
        fit(AdaptiveKL(0.1))


# -- StalenessMonitor -------------------------------------------------------------------------------------------------


def test_tokens_age_as_their_rollouts_are_reused_and_too_old_ends_the_run() -> None:
    data = tiny_data(minibatches_per_rollout=3, group_size=3)
    logged, _, _ = fit(StalenessMonitor(), data=data, max_steps=5)
    assert logged.of("staleness/token_max") == logged.of("staleness/token_mean") == [0, 1, 2, 0, 1]
    assert logged.of("staleness/since_push") == [0, 1, 2, 0, 1]
    assert logged.of("staleness/mixed_frac") == [0] * 5
    with pytest.warns(UserWarning, match="step 1 trains on tokens of weights 1 steps old, above stop_above=0"):
        _, trainer, _ = fit(StalenessMonitor(stop_above=0), data=data, max_steps=5)
    assert trainer.global_step == 2
    with pytest.raises(ValueError, match="stop_above=-1"):
        StalenessMonitor(stop_above=-1)


def test_a_completion_of_two_versions_is_mixed_and_masked_tokens_do_not_count() -> None:
    zeros, versions = torch.zeros(3), [[5, 5, 6], [2, 7, 7], [7, 7, 7]]
    rollouts = [Rollout([3], [4, 5, 6], zeros, policy_versions=torch.tensor(v)) for v in versions]
    rollouts[1].loss_mask = torch.tensor([False, True, True])
    means = ages(StepBatch([pack(rollouts, temperature=1.0)], 2, rollouts), step=8).means()
    assert means == {
        "staleness/token_mean": pytest.approx((3 + 3 + 2 + 1 + 1 + 1 + 1 + 1) / 8),
        "staleness/token_max": 3.0,
        "staleness/mixed_frac": pytest.approx(1 / 3),
    }


# -- ThroughputMonitor ------------------------------------------------------------------------------------------------


def slow(completion: str, answer: str) -> float:
    time.sleep(0.4 if answer == "val" else 0.1)
    return float(len(completion))


class SlowModule(RLModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.2)
        return super().training_step(batch, batch_idx)


def test_the_split_of_a_rollout_batchs_time() -> None:
    data = tiny_data(reward=slow, minibatches_per_rollout=2, val_prompts=[{"prompt": "w3", "answer": "val"}])
    options = {"val_check_interval": 1, "check_val_every_n_epoch": None}
    module = SlowModule(tiny_model(), lr=1e-3)
    logged, _, _ = fit(ThroughputMonitor(1e9, 1e9), module=module, data=data, **options)
    assert "split/train" not in logged.metrics[0], "only at the end of a rollout batch"
    last = logged.metrics[-1]
    assert sum(last[f"split/{stage}"] for stage in STAGES) == pytest.approx(1)
    tokens = sum(len(r.prompt_ids) + len(r.completion_ids) for rollouts in logged.rollouts[2:] for r in rollouts)
    whole = tokens / last["perf/trained_tokens_per_second"]
    completions = sum(len(r.completion_ids) for rollouts in logged.rollouts[2:] for r in rollouts)
    assert completions / last["perf/generated_tokens_per_second"] == pytest.approx(whole, rel=1e-4)
    # Two steps of 0.2 s; four rewards of 0.1 s, some at a time; two validations of 0.4 s or more, which do not count.
    assert 0.4 <= last["split/train"] * whole < whole - 0.1
    assert 0.1 <= last["split/reward"] * whole == pytest.approx(logged.of("time/reward")[2], rel=1e-4)
    assert last["split/generate"] * whole == pytest.approx(logged.of("time/generate")[2], rel=1e-4)
    floors = [last[f"floor/{stage}"] for stage in ("generate", "train", "sync")]
    assert last["perf/of_floor"] == pytest.approx(whole / sum(floors), rel=1e-4)
    assert last["perf/mfu"] == pytest.approx(last["floor/train"] / (last["split/train"] * whole), rel=1e-4)
    assert last["floor/sync"] == pytest.approx(2 * 4 * model_size(module.policy.config).base / 1e9)


def test_what_is_left_out_of_training_was_generated_all_the_same() -> None:
    module = RLModule(tiny_model(), mask_truncated=True)
    logged, _, _ = fit(ThroughputMonitor(), module=module, data=tiny_data(max_completion_tokens=1))
    last = logged.metrics[-1]
    assert last["rollout/truncated_frac"] > 0.8
    assert last["rollout/length_max"] == last["rollout/length_mean"] == 1.0
    assert last["perf/generated_tokens_per_second"] > 0
    assert last["perf/trained_tokens_per_second"] < 12 * last["perf/generated_tokens_per_second"]


def test_nothing_is_said_of_hardware_that_is_not_known() -> None:
    logged, _, _ = fit(ThroughputMonitor())
    assert not [name for name in logged.metrics[-1] if name.startswith("floor/") or name == "perf/mfu"]
    assert logged.metrics[-1]["perf/generated_tokens_per_second"] > 0
    with pytest.raises(ValueError, match="peak_flops=0 must be above 0"):
        ThroughputMonitor(peak_flops=0)


def test_operations_and_bytes_by_hand() -> None:
    model = tiny_model(tied=False)
    size, width = model_size(model.config), heads_width(model.config)
    # Every matrix but the embedding, by hand: q and o 128 x 128, k and v 128 x 64, three of 128 x 256; the head.
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256
    norms = 2 * (2 * 128 + 2 * 64)
    multiplied = 2 * layer + norms + 128 * 32
    assert width == 128
    assert training_flops(size, width, [3, 5]) == 6 * multiplied * 8 + 6 * 2 * 128 * (9 + 25)
    rollouts = [Rollout([1] * p, [2] * c, torch.zeros(c)) for p, c in ((3, 4), (2, 1))]
    positions = (3 + 4 + 5 + 6) + 2  # what each new token looks back on
    cached = 2 * 2 * 64  # keys and values of two layers with one head of 64
    assert generation_bytes(size, rollouts, 4) == 4 * (size.base * 4 + cached * positions)
