"""Strategies: where rollouts come from and how the policy is sharded. Importing this registers their names."""

from lightning.pytorch.strategies import StrategyRegistry

from lightrl.strategies.async_vllm import AsyncVLLMStrategy
from lightrl.strategies.base import RolloutStrategy
from lightrl.strategies.colocated import ColocatedHFStrategy, ColocatedVLLMStrategy

__all__ = ["AsyncVLLMStrategy", "ColocatedHFStrategy", "ColocatedVLLMStrategy", "RolloutStrategy"]

StrategyRegistry.register(
    "colocated_vllm", ColocatedVLLMStrategy, description="vLLM and FSDP2 take turns on the same devices", override=True
)
StrategyRegistry.register(
    "colocated_hf", ColocatedHFStrategy, description="the policy generates by itself, without vLLM", override=True
)
StrategyRegistry.register(
    "async_vllm", AsyncVLLMStrategy, description="vLLM generates ahead of FSDP2, on devices of its own", override=True
)
