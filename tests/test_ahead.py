"""A rank's share of what a producer hands over."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from lightrl.ahead import RolloutsAhead
from lightrl.producer import Produced
from lightrl.stream import RolloutStream
from tests.helpers.training import tiny_data


def test_places_that_stay_empty_are_told_once() -> None:
    data = tiny_data(prompts_per_step=4)
    strategy = SimpleNamespace(policy_version=3, seconds={}, phase=lambda name: nullcontext())
    data.trainer = SimpleNamespace(strategy=strategy, lightning_module=SimpleNamespace(max_sampling_rounds=2))
    ahead = RolloutsAhead(RolloutStream(data, [], seed=0))
    producer: Any = SimpleNamespace(next_batch=lambda: Produced([], waited=0.5))
    ahead._producer = producer
    with pytest.warns(UserWarning, match="after max_sampling_rounds=2 4 of 4 prompts have no group") as told:
        batches = [ahead.next_batch()[0] for _ in range(2)]
    assert [(b.groups, b.policy_version) for b in batches] == [([], 3)] * 2
    assert len(told) == 1
