"""The arithmetic of taking turns or not, by hand and against a simulation; and `lightrl plan` of both kinds."""

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrl.cli.main import main
from lightrl.planning import StepSeconds, make_plan, with_fixed_share
from tests.cli.test_command_line import CONFIG, refused
from tests.helpers.tiny import save_tiny, tiny_prompts


def test_without_staleness_an_asynchronous_step_is_the_sum_of_its_parts() -> None:
    step = StepSeconds(generate=6, train=4, reward=1, sync=0.5, swap=2, fixed_share=1 / 3)
    assert step.in_turns == 13.5
    # One of two generates: 2 s fixed, 4 x 2 s of work, rewards, 4 x 2 s of training, the push.
    assert step.asynchronous(2, 1, 0) == pytest.approx(2 + 8 + 1 + 8 + 0.5)


def test_with_staleness_the_longest_part_counts() -> None:
    step = StepSeconds(generate=8, train=2, fixed_share=0.25)
    assert step.asynchronous(4, 2, 1) == 6 * 4 / 2 + 2 / 2  # the engines' work, and the longest completion in halves
    assert step.asynchronous(4, 3, 9) == pytest.approx(6 * 4 / 3 + 2 / 10)
    assert StepSeconds(generate=1, train=8, sync=1).asynchronous(4, 2, 1) == 17  # training and push
    assert StepSeconds(generate=1, train=1, reward=30).asynchronous(4, 2, 1) == 30


def test_the_best_split_and_its_gain() -> None:
    plan = make_plan(StepSeconds(generate=12, train=4, swap=4), devices=4, max_staleness=3)
    assert plan.splits == (48.0, 24.0, 16.0)
    assert (plan.generating, plan.gain) == (3, 20 / 16)
    assert plan.verdict() == "asynchronous may be faster, 1.25 times at most, with 3 generating and 1 training devices"
    turns = make_plan(StepSeconds(generate=9, train=1), devices=2)
    assert turns.verdict() == "take turns: an asynchronous run would be slower (1.80 times as long at least)"


def test_a_tie_is_no_gain() -> None:
    tie = make_plan(StepSeconds(generate=8, train=10, swap=2), devices=8)
    assert tie.gain == 1.0
    assert tie.verdict() == "take turns: an asynchronous run would be no faster"


def simulated(lengths: list[list[int]], alpha: float, beta: float, train: float, max_staleness: int) -> float:
    """Mean seconds of a step of an ideal asynchronous run with one engine, decode step by decode step."""
    left: dict[int, list[int]] = {}  # tokens to come of each sequence in flight, by batch
    ends: list[float] = []  # when each training step ended, and its push with it
    now, begun = 0.0, 0
    while len(ends) < len(lengths):
        version = sum(end <= now for end in ends)
        while begun < len(lengths) and begun <= version + max_staleness:
            left[begun] = lengths[begun]
            begun += 1
        sequences = sum(map(len, left.values()))
        if not sequences:
            now = min(end for end in ends if end > now)
            continue
        now += alpha + beta * sequences
        left = {batch: [n - 1 for n in tokens if n > 1] for batch, tokens in left.items()}
        while left.get(len(ends)) == []:
            del left[len(ends)]
            ends.append(max(now, ends[-1] if ends else 0.0) + train)
    first = len(ends) // 4
    return (ends[-1] - ends[first]) / (len(ends) - 1 - first)


@pytest.mark.parametrize(("train", "max_staleness"), itertools.product([0.05, 0.4, 1.5], [0, 1, 3]))
def test_no_simulated_run_is_faster_than_the_plan_says(train: float, max_staleness: int) -> None:
    rng = random.Random(max_staleness)
    lengths = [[min(60, 1 + int(rng.expovariate(1 / 12))) for _ in range(16)] for _ in range(80)]
    alpha, beta = 0.01, 0.0005
    longest = sum(max(batch) for batch in lengths) / len(lengths)
    tokens = sum(map(sum, lengths)) / len(lengths)
    fixed, work = alpha * longest, beta * tokens / 2  # of two devices that take turns
    step = StepSeconds(generate=fixed + work, train=train / 2, fixed_share=fixed / (fixed + work))
    bound = step.asynchronous(2, 1, max_staleness)
    found = simulated(lengths, alpha, beta, train, max_staleness)
    assert found >= 0.97 * bound  # a run of 80 steps is not the mean of all
    assert found <= 1.5 * bound, "a bound that says nothing"


def test_half_the_prompts_say_what_is_fixed() -> None:
    step = StepSeconds(generate=10, train=1)

    def share(generate_half: float, longest: tuple[float, float] = (50, 50)) -> float:
        return with_fixed_share(step, generate_half, tokens=(400, 200), longest=longest).fixed_share

    assert share(5) == 0.0
    assert share(10) == 1.0
    assert share(8) == pytest.approx(0.6)
    assert share(11) == 1.0, "noise"
    assert share(3) == 0.0
    with pytest.raises(ValueError, match="Measure more batches"):
        share(5, longest=(50, 25))


def test_a_shorter_longest_completion_of_half_the_prompts_is_no_work_saved() -> None:
    # 0.1 s a decode step and 0.01 s a token: 50 and 40 steps, 500 and 250 tokens.
    step = with_fixed_share(StepSeconds(generate=5 + 5, train=1), 4 + 2.5, tokens=(500, 250), longest=(50, 40))
    assert step.fixed_share == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"generate": -1, "train": 1}, "generate=-1"),
        ({"generate": 1, "train": 0}, "both must be above 0"),
        ({"generate": 1, "train": 1, "fixed_share": 1.5}, "fixed_share=1.5"),
    ],
)
def test_what_is_no_time_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepSeconds(**arguments)


def test_plan_from_given_figures(capsys: Any) -> None:
    assert main(["plan", "--generate", "12", "--train", "4", "--swap", "4", "--devices", "4"]) == 0
    said, throughput, latency = capsys.readouterr().out.split("\n\n")
    assert said.startswith("--fixed-share was not given")
    assert "(0% of it fixed)" in throughput
    assert "(100% of it fixed)" in latency
    assert re.search(r"3 generate, 1 train +16\.00  <- best", throughput)
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--generate", "12", "--train", "4", "--devices", "1"])
    assert "devices=1: an asynchronous run needs at least two" in capsys.readouterr().err


def test_plan_from_measured_steps(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in tiny_prompts(8)))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    scheduled = ["--model.schedule", "linear"]  # to an end that the measuring does not have
    assert main(["plan", "-c", "config.yaml", "--batches", "3", "--planned_devices", "2", *scheduled]) == 0
    said = capsys.readouterr().out
    turns, *parts = map(float, re.findall(r"(?<= )\d+\.\d\d", said)[:6])
    assert turns == pytest.approx(sum(parts), abs=0.03)
    assert "1 generate, 1 train" in said
    assert not (tmp_path / "logs").exists()
    assert not (tmp_path / "checkpoints").exists(), "nothing is left"
    changed = CONFIG | {"data": CONFIG["data"] | {"prompts_per_step": 1}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(changed))
    assert "prompts_per_step=1 cannot be halved" in refused(capsys, "plan", "-c", "config.yaml")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    for few in ([], ["--planned_devices", "1"], ["--planned_devices", "0"]):
        said = refused(capsys, "plan", "-c", "config.yaml", *few)
        assert "an asynchronous run needs at least two" in said
        assert "--planned_devices N" in said
    options = ["plan", "-c", "config.yaml", "--trainer.strategy", "async_vllm"]
    assert "AsyncVLLMStrategy samples ahead" in refused(capsys, *options)
