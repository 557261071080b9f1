"""The benchmark of many episodes at once: its verdict, and that it plays what it says."""

from contextlib import nullcontext

from benchmarks import episodes


def test_bar_is_on_the_first_row() -> None:
    result = episodes.judge({"as they come": (1.19, 1.0), "in rounds": (2.0, 1.0)})
    assert result.ok
    assert result.figure == "1.19x the longest episode"
    assert not episodes.judge({"as they come": (1.21, 1.0)}).ok


def test_episodes_of_a_steady_engine_overlap() -> None:
    few = sorted(range(episodes.EPISODES), key=lambda i: sum(episodes.SHAPES[i]))[:8]
    together = episodes.play(nullcontext(episodes.SteadyEngine(in_rounds=False)), few)
    alone = [
        sum(episodes.SHAPES[i]) * episodes.STEP_SECONDS + (len(episodes.SHAPES[i]) - 1) * episodes.TOOL_SECONDS
        for i in few
    ]
    assert max(alone) < together < sum(alone) / 2


def test_a_turn_ends_with_an_observation_in_the_prompt() -> None:
    shape = episodes.SHAPES[3]
    assert [episodes.length([103, 9, *[2, 5, 6, 7] * turn]) for turn in range(len(shape))] == shape
