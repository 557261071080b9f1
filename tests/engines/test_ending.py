"""What an engine held is free when it has ended, and another one may follow in the same process."""

import gc
import weakref
from typing import Any

import pytest
import torch

from lightrl.engines import compat
from lightrl.strategies import ColocatedVLLMStrategy
from tests.helpers.fits import cleaned_up, sampling, with_engine
from tests.helpers.tiny import tiny_model

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "args",
    [
        {},
        pytest.param({"enforce_eager": False, "compilation_config": {"backend": "eager"}}, marks=pytest.mark.slow),
    ],
    ids=["eager", "compiled"],
)
def test_nothing_of_the_model_stays(args: dict[str, Any]) -> None:
    """vLLM and torch keep modules that were compiled or loaded anew until the process ends, unless told."""
    found: list[weakref.ref[torch.Tensor]] = []

    def body(strategy: Any) -> None:
        with strategy._rollout_phase() as engine:
            engine.generate([[5, 6, 7]], sampling(), 0)
            found.extend(weakref.ref(p) for p in compat.model_of(engine.llm).parameters())

    for _ in range(2):
        with cleaned_up():
            with_engine(tiny_model(), body, ColocatedVLLMStrategy(max_model_len=64, engine_args=args))
    gc.collect()
    assert len(found) > 20
    assert [r() for r in found if r() is not None] == []
