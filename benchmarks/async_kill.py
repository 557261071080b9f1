"""An async run killed at named places and resumed: every prompt once an epoch, nothing lost that a checkpoint held."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import Result

needs = "vllm"

PROMPTS, PROMPTS_PER_STEP, GROUP_SIZE, STEPS, KILLED_AT, TIMEOUT = 24, 3, 3, 8, 4, 150
PLACES = (
    *("before generate", "after generate", "during reward", "after reward", "during micro_batch", "during optimizer"),
    *("before push", "after push", "during validation", "before save", "during save", "after save"),
)


def train(folder: str, fault: Any, ckpt_path: str | None) -> None:
    """One epoch, with a checkpoint after each step and engines that run ahead of it."""
    from lightning.pytorch import seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightrl import RLModule
    from lightrl.corrections import TruncatedToken
    from lightrl.strategies import AsyncVLLMStrategy
    from tests.faults import Saboteur, rewarded
    from tests.helpers.fits import quiet_trainer, share_of_even_words, tiny_data
    from tests.helpers.resumable import Samples, Trace
    from tests.helpers.tiny import tiny_model, tiny_prompts

    seed_everything(7, verbose=False)
    saboteur, trace = Saboteur(fault), Trace(Path(folder))
    data = tiny_data(
        tiny_prompts(PROMPTS),
        reward=rewarded(saboteur, share_of_even_words),
        group_size=GROUP_SIZE,
        prompts_per_step=PROMPTS_PER_STEP,
        max_completion_tokens=60,
        val_prompts=tiny_prompts(2),
    )
    quiet_trainer(
        AsyncVLLMStrategy(max_staleness=3, timeout=100),
        max_steps=STEPS,
        callbacks=[Samples(trace), ModelCheckpoint(folder, every_n_train_steps=1, save_last=True), saboteur],
        enable_checkpointing=True,
        val_check_interval=KILLED_AT,
        check_val_every_n_epoch=None,
    ).fit(RLModule(tiny_model(), lr=1e-3, correction=TruncatedToken()), data, ckpt_path=ckpt_path)


def once(folder: Path, fault: Any, ckpt_path: str | None) -> list[Any]:
    from tests.helpers.processes import run_ranks

    folder.mkdir(parents=True, exist_ok=True)
    return run_ranks(train, (str(folder), fault, ckpt_path), 1, folder / "log", TIMEOUT)[0]


def sampled(folder: Path) -> dict[int, list[Any]]:
    """Return [prompt, completion] of each rollout by step; of a step that was done twice, the second time."""
    steps = {}
    for line in (folder / "trace.0").read_text().splitlines():
        entry = json.loads(line)
        steps[entry["step"]] = entry["value"][0]
    return steps


def faults(steps: dict[int, list[Any]], checkpoint: dict[str, Any]) -> tuple[list[str], dict[str, int]]:
    """Return what is not as it must be, and how much the checkpoint held."""
    from tests.helpers.tiny import tiny_prompts

    rows = [[int(word[1:]) for word in p["prompt"].split()] for p in tiny_prompts(PROMPTS)]
    ahead = checkpoint["RolloutDataModule"]["ahead"]
    wrong = []
    used = [rollout[0] for step in range(STEPS) for rollout in steps.get(step, [])]
    if sorted(used) != sorted(row for row in rows for _ in range(GROUP_SIZE)):
        wrong.append("not every prompt was trained on once")
    later = [r for step in range(checkpoint["global_step"], STEPS) for r in steps.get(step, [])]
    ready = [[r["prompt_ids"], r["completion_ids"]] for e in ahead["ready"] for r in e["group"]["rollouts"]]
    wrong += [f"a ready rollout was sampled again: {r}" for r in ready if r not in later]
    of_number = {number: rows[row] for number, row in ahead["rows"]}
    for part in ahead["parts"]:
        ids, prompt = part["token_ids"], of_number[part["number"]]
        kept = [c for p, c in later if p == prompt and (c == ids if part["ended"] else c[: len(ids)] == ids)]
        wrong += [] if kept else [f"tokens were sampled again: {part}"]
    tokens = sum(len(p["token_ids"]) for p in ahead["parts"])
    return wrong, {"ready": len(ready), "parts": len(ahead["parts"]), "tokens in them": tokens}


def killed(folder: Path, fault: Any) -> tuple[list[str], dict[str, int]]:
    codes = once(folder, fault, None)
    if codes != [-9]:
        return [f"was not killed: exit codes {codes}: {(folder / 'log.0').read_text()[-1500:]}"], {}
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    codes = once(folder, None, "last")
    if codes != [0]:
        return [f"the resumed run did not end: {codes}: {(folder / 'log.0').read_text()[-1500:]}"], {}
    return faults(sampled(folder), checkpoint)


def main(places: tuple[str, ...] = PLACES) -> Result:
    from tests.faults import Fault
    from tests.helpers.processes import preload

    preload("tests.helpers.resumable")
    table, good = [f"{'killed':24}{'held by the checkpoint':56}"], 0
    with tempfile.TemporaryDirectory() as root:
        for place in places:
            moment, phase = place.split()
            at = KILLED_AT - 1 if place == "during optimizer" else KILLED_AT
            wrong, held = killed(Path(root) / place, Fault("kill", phase, moment, at))
            good += not wrong
            table.append(f"{place:24}{held!s:56}{'; '.join(wrong)}")
            print(table[-1], flush=True)
    return Result(figure=f"{good} of {len(places)} places", bar="all", ok=good == len(places), table="\n".join(table))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_kill", description=__doc__)
    parser.add_argument("places", nargs="*", default=PLACES, help="such as 'during reward'")
    result = main(tuple(parser.parse_args().places))
    raise SystemExit(not result.ok)
