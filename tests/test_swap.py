"""The order of a change of turns, and what is pushed again after the engine lost its weights or a change failed."""

from typing import Any

import pytest
import torch

from lightrl import RLModule
from lightrl.engines.base import WeightSyncError
from lightrl.engines.hf import HFEngine
from lightrl.swap import Swap
from lightrl.weights.source import Weights
from tests.helpers.tiny import tiny_model


class Sleeper(HFEngine):
    """An engine whose weights are gone when it sleeps, as a GPU's are; notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__(tiny_model(seed=5), torch.device("cpu"))
        self.asked: list[str] = []
        self.fails = self.deaf = False

    def load_weights(self, weights: Weights) -> None:
        self.asked.append("load")
        if not self.deaf:
            own = dict(self.policy.named_parameters())
            with torch.no_grad():
                for name, tensor in weights:
                    own[name].copy_(tensor)

    def sleep(self) -> bool:
        self.asked.append("sleep")
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.zero_()
        return True

    def wake_weights(self) -> None:
        self.asked.append("weights")

    def wake_cache(self) -> None:
        self.asked.append("cache")
        if self.fails:
            raise MemoryError("no cache")


def make(**args: Any) -> tuple[Swap, Sleeper]:
    engine, module = Sleeper(), RLModule(tiny_model())
    module.configure_model()
    swap = Swap(engine, module, torch.float32, **{"optimizers": list, **args})
    assert engine.asked == ["sleep"]
    engine.asked.clear()
    return swap, engine


def test_weights_come_before_the_cache_and_again_after_each_sleep() -> None:
    swap, engine = make()
    for stale in (True, False):
        assert swap.to_engine(stale=stale) > 0
        swap.to_trainer()
    assert engine.asked == ["weights", "load", "cache", "sleep"] * 2


def test_an_engine_sleeps_until_a_step_has_shown_that_both_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    done = [7]  # of a run that is resumed
    swap, engine = make(steps=lambda: done[0], sleep=None)
    numbers = {"memory_allocated": 40, "max_memory_allocated": 60, "mem_get_info": (32, 0)}
    for name, number in numbers.items():  # GiB: 20 more than now were in use at most, so 30 + 2 are wanted
        value = tuple(n * 2**30 for n in number) if isinstance(number, tuple) else number * 2**30
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    swap._on_gpu = True

    def turns() -> list[str]:
        engine.asked.clear()
        swap.to_engine(stale=True)
        swap.to_trainer()
        return engine.asked

    assert turns() == ["weights", "load", "cache", "sleep"]  # nothing was trained yet
    done[0] += 1
    assert turns() == ["weights", "load", "cache"]
    assert turns() == ["load"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (31 * 2**30, 0))
    assert turns() == ["load", "sleep"]
    assert turns() == ["weights", "load", "cache", "sleep"]


def test_after_a_change_that_failed_all_is_pushed_and_compared_again() -> None:
    swap, engine = make()
    swap.to_engine(stale=True)
    swap.to_trainer()
    engine.fails = True
    with pytest.raises(MemoryError, match="no cache"):
        swap.to_engine(stale=True)
    engine.fails, engine.deaf = False, True
    engine.sleep()
    engine.asked.clear()
    with pytest.raises(WeightSyncError, match="engine and trainer disagree"):
        swap.to_engine(stale=False)
    assert engine.asked == ["weights", "load", "cache"]
    engine.deaf = False
    swap.to_engine(stale=False)
    swap.to_trainer()
    assert engine.asked[-4:] == ["weights", "load", "cache", "sleep"]
