"""The order in which rows come: each once an epoch, and resumed exactly."""

import json
import random

import numpy as np
import pytest
import torch

from lightrl.prompts import PromptOrder


def test_each_epoch_visits_each_row_once_and_differs() -> None:
    order = PromptOrder(10, seed=1)
    epochs = [order.take(10) for _ in range(3)]
    assert all(sorted(e) == list(range(10)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert PromptOrder(10, seed=2).take(10) != epochs[0]


def test_take_crosses_epochs_and_drops_nothing() -> None:
    whole = PromptOrder(10, seed=1).take(60)
    order = PromptOrder(10, seed=1)
    pieces = [order.take(n) for n in (3, 4, 0, 4, 25, 24)]
    assert [len(p) for p in pieces] == [3, 4, 0, 4, 25, 24]
    assert sum(pieces, []) == whole
    assert [whole.count(i) for i in range(10)] == [6] * 10


def test_unshuffled_order_is_the_rows_own() -> None:
    assert PromptOrder(3, seed=0, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("done", [0, 4, 10, 13])
def test_order_resumes_exactly(done: int) -> None:
    order = PromptOrder(10, seed=1)
    order.take(done)
    state = json.loads(json.dumps(order.state_dict()))
    resumed = PromptOrder(10, seed=5)
    resumed.load_state_dict(state)
    assert resumed.take(25) == order.take(25)
    assert resumed.state_dict() == order.state_dict()


def test_order_of_other_data_is_not_continued() -> None:
    with pytest.raises(ValueError, match="10 prompts and the data set now has 11"):
        PromptOrder(11, seed=1).load_state_dict(PromptOrder(10, seed=1).state_dict())


def test_order_leaves_global_random_state_alone() -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    PromptOrder(10, seed=1).take(35)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


@pytest.mark.parametrize(("arguments", "message"), [((0, 1), "num_prompts=0"), ((3, -1), "seed=-1")])
def test_bad_order_arguments(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptOrder(*arguments)
    with pytest.raises(ValueError, match=r"take\(-1\)"):
        PromptOrder(3, 1).take(-1)
