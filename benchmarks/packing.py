"""Packed rows against rows padded to the longest: real tokens/s, forward and backward."""

from typing import Any

from benchmarks import Result
from benchmarks.prefix import ERROR_BAR, make_model, measure

SEQUENCES, SHORTEST, LONGEST, MICRO_BATCHES, ROUNDS = 64, 16, 1024, 4, 2
BAR = 0.9  # of what leaving out the padding can give where attention costs nothing


def draw() -> list[Any]:
    import torch

    from lightrl import Rollout

    g = torch.Generator().manual_seed(0)
    rollouts = []
    for i, length in enumerate(torch.randint(SHORTEST, LONGEST + 1, (SEQUENCES,), generator=g).tolist()):
        ids = torch.randint(3, 1024, (length,), generator=g).tolist()
        rollouts.append(Rollout(ids[: length // 2], ids[length // 2 :], torch.zeros(length - length // 2), group_id=i))
    return rollouts


def judge(seconds: dict[str, float], error: float, real: int, rows: int, padded: int) -> Result:
    ratio, bar = seconds["padded"] / seconds["packed"], BAR * padded / real
    table = [f"{'64 lengths from 16..1024':26}{'row tokens':>11}{'CPU s':>8}{'real tokens/s':>15}"]
    for name, tokens in {"padded": rows, "packed": real}.items():
        table.append(f"{name:26}{tokens:>11}{seconds[name]:>8.2f}{real / seconds[name]:>15.0f}")
    table.append(f"(padded to the mini-batch's longest: {padded} row tokens, from which the bar is computed)")
    table.append(f"(forward + backward, 4 layers, 256 wide, one thread; gradients differ by {error:.1e})")
    return Result(
        figure=f"{ratio:.2f}x real tokens/s",
        bar=f">= {BAR} x {padded / real:.2f} = {bar:.2f}x",
        ok=ratio >= bar and error <= ERROR_BAR,
        table="\n".join(table),
    )


def main() -> Result:
    from lightrl.packing import pack
    from lightrl.policy import PolicyForward

    rollouts = draw()
    # Dealt, so that memory stays small; each part is padded to its own longest, which favours the padded side a little.
    micros = [pack(rollouts[i::MICRO_BATCHES], temperature=1.0) for i in range(MICRO_BATCHES)]
    ways = {"padded": (PolicyForward(packed=False), micros), "packed": (PolicyForward(packed=True), micros)}
    seconds, found = measure(make_model(hidden=256), ways, ROUNDS)
    error = float((found["packed"] - found["padded"]).norm() / found["padded"].norm())
    lengths = [len(r.token_ids) for r in rollouts]
    rows = sum(len(m.lengths) * max(m.lengths) for m in micros)
    return judge(seconds, error, sum(lengths), rows, len(lengths) * max(lengths))
