"""New weights while requests run: how long these stand still, and whose tokens come after."""

from typing import Any

from benchmarks import Result

needs = "vllm"

PUSHES, REQUESTS, TOKENS = 10, 8, 100
PAUSE_BAR, GAP_BAR = 0.1, 1e-4


def model() -> Any:
    """The demo's."""
    import tempfile
    from pathlib import Path

    from examples.tiny.task import write_task
    from lightrl.policy import load_policy

    with tempfile.TemporaryDirectory() as folder:
        return load_policy(str(write_task(Path(folder)).model_dir))


def changed(policy: Any, version: int) -> None:
    """Move the weights far enough that a mix of old and new would show."""
    import torch

    g = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=g))


def gaps(outputs: list[Any], prompts: list[list[int]], policies: list[Any]) -> list[tuple[int, float]]:
    """For each span of each completion that follows a push: its version, and how far it is from that policy."""
    import torch

    from lightrl.partial import completion

    found = []
    for output, prompt in zip(outputs, prompts, strict=True):
        sampled = completion(output)
        ids = torch.tensor([prompt + sampled.token_ids])
        for version in sampled.policy_versions.unique().tolist():
            with torch.no_grad():
                logits = policies[version](ids).logits[0, len(prompt) - 1 : -1].double()
            right = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            span = sampled.policy_versions == version
            found.append((version, float((right - sampled.logprobs)[span].abs().max())))
    return found


def measure() -> tuple[list[float], list[tuple[int, float]]]:
    import asyncio
    import copy
    import time

    import torch

    from lightrl.engines.messages import EngineSpec, Request
    from lightrl.engines.staging import Shipment
    from lightrl.engines.vllm import engine_config
    from lightrl.pools.launchers import LocalLauncher
    from lightrl.pools.pool import EnginePool
    from lightrl.weights.source import PolicyWeights

    policy = model()
    pool = EnginePool(LocalLauncher(), EngineSpec(engine_config(policy).to_dict(), "float32", max_model_len=TOKENS + 8))
    policies, pauses, found = [copy.deepcopy(policy)], [], []
    prompts = [[4 + i, 5, 6] for i in range(REQUESTS)]
    try:
        pool.start()
        pool.push(Shipment(PolicyWeights(policy, torch.float32), 0, recompute_kv=True))
        for version in range(1, PUSHES + 1):
            requests = [Request(f"{version}.{i}", p, TOKENS) for i, p in enumerate(prompts)]  # nothing ends them early
            running = asyncio.run_coroutine_threadsafe(pool.generate(requests), pool.loop)
            time.sleep(0.15)
            changed(policy, version)
            policies.append(copy.deepcopy(policy))
            pool.push(Shipment(PolicyWeights(policy, torch.float32), version, recompute_kv=True))
            pauses += pool.pauses
            found += gaps(running.result(60), prompts, policies)
    finally:
        pool.close()
    return pauses, found


def judge(pauses: list[float], found: list[tuple[int, float]]) -> Result:
    longest, worst = max(pauses), max(gap for _, gap in found)
    met = len(found) - PUSHES * REQUESTS  # spans beyond one for each completion
    milliseconds = sorted(1000 * p for p in pauses)
    table = [
        f"{'pushes':34}{len(pauses)}",
        f"{'pause, ms: median, longest':34}{milliseconds[len(pauses) // 2]:.1f}, {milliseconds[-1]:.1f}",
        f"{'completions that a push met':34}{met} of {PUSHES * REQUESTS}",
        f"{'max |logprob - its own policy|':34}{worst:.1e}",
    ]
    return Result(
        figure=f"pause {1000 * longest:.0f} ms, logprobs within {worst:.1e}",
        bar=f"<= {1000 * PAUSE_BAR:.0f} ms, <= {GAP_BAR:.0e}, pushes meet running requests",
        ok=longest <= PAUSE_BAR and worst <= GAP_BAR and met > 0,
        table="\n".join(table),
    )


def main() -> Result:
    return judge(*measure())
