"""Chunked token logprobs against full-vocabulary logits: error, peak memory, time of forward and backward."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import Result

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
ERROR_BAR, MEMORY_BAR, TIME_BAR = 1e-5, 1 / 8, 1.3
TOKENS, VOCABULARY = 16_384, 151_936
FULL_BYTES = 4 * TOKENS * VOCABULARY
ROUNDS = 3

# In a process of its own, because a process's peak memory never falls. The hidden size is small so that the gradients,
# which any path has, weigh little beside what the path itself needs; they count all the same.
MEMORY_SCRIPT = f"""
import re, torch
from lightrl.logprobs import chunked_token_logprobs

def peak():  # not ru_maxrss, which a process inherits from the one that started it
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1])

def step(tokens, vocabulary):
    hidden = torch.randn(tokens, 64, requires_grad=True)
    weight = torch.randn(vocabulary, 64, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    before = peak()
    chunked_token_logprobs(hidden, weight, targets)[0].sum().backward()
    return peak() - before

step(8, 16)
print(step({TOKENS}, {VOCABULARY}))
"""


def problem(tokens: int, vocabulary: int, size: int) -> "tuple[Tensor, Tensor, Tensor]":
    import torch

    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=random).requires_grad_()
    weight = (torch.randn(vocabulary, size, generator=random) * 3 * size**-0.5).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=random)


def largest_error() -> float:
    import torch

    from lightrl.logprobs import chunked_token_logprobs

    hidden, weight, targets = problem(512, 32_768, 1024)
    with torch.no_grad():
        exact = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(-1, targets[:, None]).squeeze(-1)
        return (chunked_token_logprobs(hidden, weight, targets)[0] - exact).abs().max().item()


def extra_bytes() -> int:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=900, check=True
    )
    return int(done.stdout)


def cpu_seconds() -> tuple[float, float]:
    """Both paths at 2k x 32k: CPU time on one thread, which a busy machine disturbs least; best of rounds."""
    import torch

    from lightrl.logprobs import chunked_token_logprobs

    hidden, weight, targets = problem(2048, 32_768, 1024)
    upstream = torch.randn(2048)

    def full() -> None:
        scores = torch.log_softmax((hidden @ weight.T).float(), -1)
        scores.gather(-1, targets[:, None]).squeeze(-1).backward(upstream)

    def chunked() -> None:
        chunked_token_logprobs(hidden, weight, targets)[0].backward(upstream)

    def seconds(call: Callable[[], None]) -> float:
        hidden.grad = weight.grad = None
        started = time.process_time()
        call()
        return time.process_time() - started

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = [(seconds(full), seconds(chunked)) for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    return min(f for f, _ in rounds), min(c for _, c in rounds)


def judge(error: float, memory: float, full: float, chunked: float) -> Result:
    share, ratio = memory / FULL_BYTES, chunked / full
    rows = [
        ("max |logprob - float64|, 512 x 32k", "-", f"{error:.1e}", f"<= {ERROR_BAR:.0e}", error <= ERROR_BAR),
        (
            "peak extra memory, 16k x 152k, GB",
            f"{FULL_BYTES / 1e9:.2f}",
            f"{memory / 1e9:.2f}",
            f"< {FULL_BYTES * MEMORY_BAR / 1e9:.2f}",
            share < MEMORY_BAR,
        ),
        ("CPU s, 2k x 32k, D 1024", f"{full:.2f}", f"{chunked:.2f}", f"<= {full * TIME_BAR:.2f}", ratio <= TIME_BAR),
    ]
    table = [f"{'forward + backward, float32':37}{'full':>8}{'chunked':>9}  bar"]
    table += [f"{what:37}{a:>8}{b:>9}  {bar}{'' if ok else ' short'}" for what, a, b, bar, ok in rows]
    table.append(
        "(the chunked time includes the entropy, the full one does not; full memory is computed: logits alone)"
    )
    return Result(
        figure=f"error {error:.1e}, memory {share:.3f} of full logits, time {ratio:.2f}x",
        bar=f"<= {ERROR_BAR:.0e}, < {MEMORY_BAR:.3f}, <= {TIME_BAR}x",
        ok=all(ok for *_, ok in rows),
        table="\n".join(table),
    )


def main() -> Result:
    return judge(largest_error(), extra_bytes(), *cpu_seconds())
