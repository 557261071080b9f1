"""200 merged LoRA syncs into vLLM: the base stays bit for bit, and the engine says what the trainer says."""

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import Result

needs = "vllm peft"

SYNCS, BAR = 200, 1e-4
EVERY = 50  # rows of the table


def measure(syncs: int, folder: Path) -> list[dict[str, float]]:
    """Train adapters on the demo's task for so many steps; at each sync score fixed sequences on both sides."""
    import torch
    from lightning.pytorch import Callback, seed_everything

    from examples.tiny.task import reward, write_task
    from lightrl import RLModule, RolloutDataModule, Trainer
    from lightrl.lora import is_adapter
    from lightrl.sharding import local_tensor, reshard
    from lightrl.weights.canary import Canary

    def parameters(module: Any, adapters: bool) -> dict[str, Any]:
        reshard(module.policy)
        chosen = {n: p for n, p in module.policy.named_parameters() if is_adapter(n) == adapters}
        return {n: local_tensor(p).clone() for n, p in chosen.items()}

    class Compare(Callback):
        def __init__(self) -> None:
            self.rows: list[dict[str, float]] = []
            self.base: dict[str, Any] = {}
            self.before: list[Any] = []
            self.started = time.perf_counter()

        def on_weights_synced(self, trainer: Any, module: Any, policy_version: int, seconds: float) -> None:
            base = parameters(module, adapters=False)
            self.base = self.base or base
            canary = Canary(module.policy.config.vocab_size)
            expected = torch.cat(canary.trainer_logprobs(module))
            found = torch.cat(trainer.strategy._engine.score(canary.sequences))
            moved = float((expected - self.before[-1]).abs().max()) if self.before else 0.0
            self.before.append(expected)
            self.rows.append(
                {
                    "sync": len(self.rows) + 1,
                    "changed": sum(not torch.equal(base[n], self.base[n]) for n in base),
                    "tensors": len(base),
                    "gap": float((found - expected).abs().max()),
                    "moved": moved,
                    "ms": 1000 * seconds,
                }
            )

    seed_everything(0, verbose=False)
    task, compare = write_task(folder), Compare()
    module = RLModule(task.model_dir, lora={"r": 8, "lora_alpha": 16}, lr=5e-3, kl_coef=0.01)
    data = RolloutDataModule(str(task.train), reward=reward, prompts_per_step=8, max_completion_tokens=4)
    trainer = Trainer(
        strategy="colocated_vllm",
        accelerator="cpu",
        devices=1,
        max_steps=syncs,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[compare],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, data)
    return compare.rows


def judge(rows: list[dict[str, float]]) -> Result:
    changed, gap = max(r["changed"] for r in rows), max(r["gap"] for r in rows)
    moved, last = sum(r["moved"] for r in rows) / max(1, len(rows) - 1), rows[-1]
    table = [f"{'sync':>5}{'base tensors changed':>22}{'engine - trainer':>18}{'moved since':>13}{'push, ms':>10}"]
    for r in [r for r in rows if r["sync"] == 1 or r["sync"] % EVERY == 0]:
        share = f"{r['changed']:.0f} of {r['tensors']:.0f}"
        table.append(f"{r['sync']:5.0f}{share:>22}{r['gap']:18.1e}{r['moved']:13.3f}{r['ms']:10.0f}")
    table.append(f"(largest |difference| of logprobs in float32; from one sync to the next they move by {moved:.3f})")
    complete = last["sync"] >= SYNCS and moved > 10 * BAR  # or a stale engine would pass
    return Result(
        figure=f"{last['sync']:.0f} syncs, {changed:.0f} base tensors changed, logprobs within {gap:.1e}",
        bar=f"{SYNCS} syncs, 0 changed, <= {BAR:.0e}",
        ok=complete and not changed and gap <= BAR,
        table="\n".join(table),
    )


def main() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return judge(measure(SYNCS, Path(folder)))
