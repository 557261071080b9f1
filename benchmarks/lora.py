"""LoRA on the demo's task from a half-trained model: reward, share of parameters, size of checkpoints, exact resume."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import Result

needs = "vllm peft"

WARM_STEPS, STEPS = 25, 40
SHARE_BAR, SIZE_BAR = 0.05, 0.1


def fit(module: Any, task: Any, steps: int, folder: Path, every: int, **args: Any) -> tuple[float, float]:
    """Train, with a checkpoint every so many steps; held-out pass@1 before and after."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from examples.tiny.training import make_data
    from lightrl import Trainer

    data = make_data(task, prompts_per_step=32, seed=0)
    trainer = Trainer(
        strategy="colocated_vllm",
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        limit_val_batches=0 if args else 1.0,
        logger=False,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)],
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    before = 0.0 if args else trainer.validate(module, data, verbose=False)[0]["val/pass@1"]
    trainer.fit(module, data, **args)
    after = 0.0 if args else trainer.validate(module, data, verbose=False)[0]["val/pass@1"]
    return before, after


def warmed_model(task: Any, folder: Path) -> Path:
    """Train the demo's model for a while, and save it beside its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    from lightrl import RLModule
    from lightrl.weights.source import iter_weights

    module = RLModule(task.model_dir, lr=1e-3)
    fit(module, task, WARM_STEPS, folder / "full", WARM_STEPS)
    shutil.copytree(task.model_dir, folder / "warm")
    model = AutoModelForCausalLM.from_pretrained(folder / "warm")
    model.load_state_dict(dict(iter_weights(module.policy, torch.float32)))
    model.save_pretrained(folder / "warm")
    return folder / "warm"


def measure(folder: Path) -> dict[str, float]:
    import torch
    from lightning.pytorch import seed_everything

    from examples.tiny.task import write_task
    from lightrl import RLModule
    from lightrl.sharding import full_tensor

    seed_everything(0, verbose=False)
    task = write_task(folder)
    warm = warmed_model(task, folder)

    def adapters() -> Any:
        return RLModule(warm, lora={"r": 2, "lora_alpha": 8}, lr=5e-3)

    module, resumed = adapters(), adapters()
    before, after = fit(module, task, STEPS, folder / "lora", STEPS // 2)
    fit(resumed, task, STEPS, folder / "again", STEPS, ckpt_path=folder / "lora" / f"step={STEPS // 2}.ckpt")
    pairs = list(zip(module.policy.parameters(), resumed.policy.parameters(), strict=True))
    sizes = [p.numel() for p in module.policy.parameters()]
    trained = [p.numel() for p in module.policy.parameters() if p.requires_grad]
    files = [folder / "lora" / f"step={STEPS}.ckpt", folder / "full" / f"step={WARM_STEPS}.ckpt"]
    return {
        "before": before,
        "after": after,
        "share": sum(trained) / sum(sizes),
        "size": files[0].stat().st_size / files[1].stat().st_size,
        "differ": sum(not torch.equal(full_tensor(a), full_tensor(b)) for a, b in pairs),
    }


def judge(found: dict[str, float]) -> Result:
    before, after, share, size, differ = (found[n] for n in ("before", "after", "share", "size", "differ"))
    rows = [
        (f"held-out pass@1 before (full training, {WARM_STEPS} steps)", f"{before:.3f}", "", True),
        (f"held-out pass@1 after {STEPS} steps of LoRA", f"{after:.3f}", f"> {before:.3f}", after > before),
        ("trained parameters / all", f"{share:.3f}", f"< {SHARE_BAR}", share < SHARE_BAR),
        ("checkpoint / full checkpoint, bytes", f"{size:.3f}", f"< {SIZE_BAR}", size < SIZE_BAR),
        ("tensors that differ after a resume", f"{differ:.0f}", "0", not differ),
    ]
    return Result(
        figure=f"pass@1 {before:.3f} -> {after:.3f}, {share:.1%} trained, checkpoint {size:.1%}, {differ:.0f} differ",
        bar=f"rises, < {SHARE_BAR:.0%}, < {SIZE_BAR:.0%}, 0",
        ok=all(ok for *_, ok in rows),
        table="\n".join(f"{what:52}{figure:>8}  {bar}{'' if ok else '  short'}" for what, figure, bar, ok in rows),
    )


def main() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return judge(measure(Path(folder)))
