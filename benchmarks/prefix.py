"""A shared prompt that passes through the model once against once for each completion: tokens/s, same gradient."""

import time
from typing import Any

from benchmarks import Result

PROMPT, COMPLETION, MEMBERS = 512, 64, 8
SPEED_BAR, ERROR_BAR = 2.5, 1e-5
ROUNDS = 3


def make_model(hidden: int = 512, layers: int = 4) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=2048,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config).train()


def one_group() -> list[Any]:
    import torch

    from lightrl import Rollout

    g = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 1024, (PROMPT,), generator=g).tolist()
    completions = torch.randint(3, 1024, (MEMBERS, COMPLETION), generator=g).tolist()
    return [Rollout(prompt, completion, torch.zeros(COMPLETION)) for completion in completions]


def measure(
    model: Any, ways: dict[str, tuple[Any, list[Any]]], rounds: int = ROUNDS
) -> tuple[dict[str, float], dict[str, Any]]:
    """Best CPU seconds, on one thread, of forward and backward of each (forward, micro-batches), and its gradient."""
    import torch

    seconds, gradients = dict.fromkeys(ways, float("inf")), {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(rounds):
            for name, (forward, micros) in ways.items():
                model.zero_grad()
                started = time.process_time()
                for micro in micros:
                    logprobs = forward(model, micro)[0]
                    logprobs.backward(torch.linspace(-1, 1, len(logprobs)))
                seconds[name] = min(seconds[name], time.process_time() - started)
                gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
    finally:
        torch.set_num_threads(threads)
    return seconds, gradients


def judge(seconds: dict[str, float], error: float, tokens: int) -> Result:
    speed = {name: tokens / s for name, s in seconds.items()}
    ratio = speed["shared"] / speed["not shared"]
    table = [f"{'prompt 512, 8 completions of 64':33}{'CPU s':>8}{'tokens/s':>10}"]
    table += [f"{name:33}{seconds[name]:>8.2f}{speed[name]:>10.0f}" for name in seconds]
    table.append(f"(forward + backward, 4 layers, 512 wide, one thread; gradients differ by {error:.1e})")
    return Result(
        figure=f"{ratio:.2f}x tokens/s, gradient within {error:.1e}",
        bar=f">= {SPEED_BAR}x, <= {ERROR_BAR:.0e}",
        ok=ratio >= SPEED_BAR and error <= ERROR_BAR,
        table="\n".join(table),
    )


def main() -> Result:
    from lightrl.packing import pack
    from lightrl.policy import PolicyForward

    rollouts = one_group()
    forward = PolicyForward(packed=True)
    shared = pack(rollouts, temperature=1.0, share_prefix=True)
    ways = {"not shared": (forward, [pack(rollouts, temperature=1.0)]), "shared": (forward, [shared])}
    seconds, found = measure(make_model(), ways)
    error = float((found["shared"] - found["not shared"]).norm() / found["not shared"].norm())
    return judge(seconds, error, shared.num_tokens)
