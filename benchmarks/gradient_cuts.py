"""The gradient of one step for every cut of its mini-batch, every strategy, 1 and 2 ranks: largest relative error."""

import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import Result
from benchmarks._subprocess import run_module

BAR = 1e-5
GROUPS, MEMBERS, LONGEST = 4, 4, 24
AGGREGATIONS = ("token", "sequence", "constant")
WAYS = {"padded": (False, False), "packed": (True, False), "shared": (True, True)}
STRATEGIES = ("plain", "FSDP2 each", "FSDP2 deferred")
CUTS = list(itertools.product(AGGREGATIONS, WAYS, range(1, 9)))


def draw() -> list[Any]:
    import torch

    from lightrl import Rollout

    g = torch.Generator().manual_seed(0)
    rollouts = []
    for group in range(GROUPS):
        prompt = torch.randint(3, 1024, (int(torch.randint(1, LONGEST, (), generator=g)),), generator=g).tolist()
        for _ in range(MEMBERS):
            size = int(torch.randint(1, LONGEST, (), generator=g))
            completion = torch.randint(3, 1024, (size,), generator=g).tolist()
            old = -7 + 0.3 * torch.randn(size, generator=g)  # about log(1 / 1024), so that some ratios are clipped
            advantage = float(torch.randn((), generator=g))
            rollouts.append(Rollout(prompt, completion, old, scored_logprobs=old, advantage=advantage, group_id=group))
    return rollouts


def model() -> Any:
    from benchmarks.prefix import make_model

    return make_model(hidden=128, layers=2)


def by_hand(aggregation: str) -> Any:
    """The gradient of GRPO's clipped loss in float64, rollout by rollout, without anything of lightrl's."""
    import torch

    policy, rollouts = model().double(), draw()
    total = sum(len(r.completion_ids) for r in rollouts)
    for r in rollouts:
        logits = policy(torch.tensor([r.prompt_ids + r.completion_ids])).logits[0, len(r.prompt_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(r.completion_ids)[:, None])[:, 0]
        ratio = (logprobs - r.old_logprobs).exp()
        terms = torch.minimum(ratio * r.advantage, ratio.clamp(0.8, 1.2) * r.advantage)
        n = len(rollouts)
        size = {"token": total, "sequence": n * len(r.completion_ids), "constant": n * LONGEST}[aggregation]
        (-terms.sum() / size).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def fit(strategy: str, ranks: int) -> list[Any]:
    """One optimizer step for each of ``CUTS``, at learning rate 0; their gradients."""
    import torch
    from lightning.pytorch import Trainer

    from lightrl import RLModule
    from lightrl.balance import Packer
    from lightrl.datamodule import SizedLoader
    from lightrl.distributed import rank, world_size
    from lightrl.packing import StepBatch, live_tokens
    from lightrl.policy import PolicyForward
    from lightrl.strategies import ColocatedHFStrategy

    rollouts, gradients = draw(), []

    class Watched(RLModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.policy.parameters(), lr=0.0)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.aggregation, way, _ = CUTS[batch_idx]
            self.policy_forward = PolicyForward(*WAYS[way])
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            grads = [p.grad for p in self.policy.parameters()]
            grads = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
            gradients.append(torch.cat([g.flatten().double() for g in grads]))

    module = Watched(model())

    def step(i: int) -> StepBatch:
        aggregation, way, count = CUTS[i]
        packer = Packer(share_prefix=WAYS[way][1])
        denominator = RLModule(model(), aggregation=aggregation).denominator(
            live_tokens(rollouts), len(rollouts), LONGEST
        )
        parts = packer.split(rollouts[rank() :: world_size()], count)
        return StepBatch([packer.pack(p, temperature=1.0, denominator=denominator) for p in parts], policy_version=0)

    plain = "auto" if ranks == 1 else "ddp"
    trainer = Trainer(
        strategy=plain if strategy == "plain" else ColocatedHFStrategy(defer_grad_sync=strategy == "FSDP2 deferred"),
        accelerator="cpu",
        devices=ranks,
        max_steps=len(CUTS),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, SizedLoader(len(CUTS), step))
    return gradients


def run(ranks: int, out: Path) -> None:
    """In a process of its own: largest relative error by strategy and aggregation."""
    from lightrl.distributed import rank

    right = {aggregation: by_hand(aggregation) for aggregation in AGGREGATIONS}
    errors: dict[str, dict[str, float]] = {}
    for strategy in STRATEGIES:
        found = errors.setdefault(strategy, dict.fromkeys(AGGREGATIONS, 0.0))
        for (aggregation, _, _), gradient in zip(CUTS, fit(strategy, ranks), strict=True):
            error = float((gradient - right[aggregation]).norm() / right[aggregation].norm())
            found[aggregation] = max(found[aggregation], error)
    if rank() == 0:
        out.write_text(json.dumps(errors))


def judge(errors: dict[int, dict[str, dict[str, float]]]) -> Result:
    table = [f"{'ranks, strategy':26}" + "".join(f"{a:>10}" for a in AGGREGATIONS)]
    for ranks, by_strategy in errors.items():
        for strategy, found in by_strategy.items():
            table.append(f"{ranks}, {strategy:23}" + "".join(f"{found[a]:>10.1e}" for a in AGGREGATIONS))
    table.append(
        "(largest |g - right| / |right| over 1..8 micro-batches x padded, packed, packed with shared prefixes;\n"
        " right: a plain float64 loop, rollout by rollout)"
    )
    worst = max(e for by_strategy in errors.values() for found in by_strategy.values() for e in found.values())
    return Result(f"{worst:.1e} relative error", f"<= {BAR:.0e}", worst <= BAR, "\n".join(table))


def main() -> Result:
    errors = {}
    # Otherwise gloo binds to whatever the host's name resolves to, which in a container may be nothing.
    env = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")} if sys.platform == "linux" else {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            out = Path(folder) / f"{ranks}.json"
            run_module("benchmarks.gradient_cuts", ranks, out, timeout=300, env=env)
            errors[ranks] = json.loads(out.read_text())
    return judge(errors)


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
