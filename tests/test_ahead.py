"""A rank's share of what a producer hands over."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from lightrl.ahead import RolloutsAhead
from lightrl.producer import Produced
from lightrl.stream import RolloutStream
from tests.helpers.training import tiny_data


def test_places_that_stay_empty_are_told_once() -> None:
    data = tiny_data(prompts_per_step=4)
    data.trainer = SimpleNamespace(
        strategy=SimpleNamespace(policy_version=3, seconds={}), lightning_module=SimpleNamespace(max_sampling_rounds=2)
    )
    ahead = RolloutsAhead(RolloutStream(data, [], seed=0))
    producer: Any = SimpleNamespace(next_batch=lambda: Produced([], waited=0.5))
    ahead._producer = producer
    with pytest.warns(UserWarning, match="after max_sampling_rounds=2 4 of 4 prompts have no group"):
        batch, _ = ahead.next_batch()
    assert (batch.groups, batch.policy_version) == ([], 3)
    with warnings.catch_warnings(action="error"):
        ahead.next_batch()
