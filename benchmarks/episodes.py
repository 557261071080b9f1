"""64 episodes with 50 ms tools, all at once, against the longest of them alone."""

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from benchmarks import Result

EPISODES, TOOL_SECONDS, STEP_SECONDS, ROUNDS = 64, 0.05, 0.005, 3
TURNS, TOKENS = (2, 6), (4, 40)
"""Of each episode, and of each of its turns: drawn evenly."""
STOP = 2
BAR = 1.2
SHAPES = [
    [random.Random(f"{episode}/{turn}").randint(*TOKENS) for turn in range(random.Random(episode).randint(*TURNS))]
    for episode in range(EPISODES)
]


class Tool:
    """Takes its time, once for each turn but the last."""

    def __init__(self, prompt: Any) -> None:
        self.turns = len(SHAPES[prompt.index])

    def step(self, turn: Any) -> Any:
        from lightrl.environments import Done

        if turn.index + 1 == self.turns:
            return Done(reward=1.0)
        time.sleep(TOOL_SECONDS)
        return [5, 6, 7]


def length(prompt_ids: list[int]) -> int:
    """Tokens of the coming turn: the first token is the episode, each observation (5, 6, 7) ends a turn."""
    return SHAPES[prompt_ids[0] - 100][prompt_ids.count(7)]


@dataclass
class SteadyEngine:
    """A decode step takes the same time whatever the batch, as on a GPU that is bound by reading the weights."""

    in_rounds: bool
    running: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def step(self, requests: list[Any]) -> list[tuple[int, Any]]:
        self.running |= {r.key: length(r.prompt_ids) for r in requests}
        self.sizes |= self.running
        ended: list[tuple[int, Any]] = []
        while self.running and not (ended and not self.in_rounds):
            time.sleep(STEP_SECONDS)
            self.running = {key: left - 1 for key, left in self.running.items()}
            ended += [(key, completion(self.sizes[key])) for key, left in self.running.items() if left == 0]
            self.running = {key: left for key, left in self.running.items() if left}
            if not self.in_rounds:
                break
        return ended

    def gather(self, value: Any) -> list[Any]:
        return [value]


def completion(size: int) -> Any:
    import torch

    from lightrl.types import Completion

    return Completion([*[9] * (size - 1), STOP], torch.zeros(size), torch.zeros(size, dtype=torch.int64), False)


class Words:
    """A tokenizer that only has to decode."""

    def __len__(self) -> int:
        return 1024

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def play(session: AbstractContextManager[Any], which: list[int], turn_tokens: int | None = None) -> float:
    """Play some of the episodes and return the seconds from the first request to the last answer."""
    from lightrl.environments import Episodes
    from lightrl.environments.episode import Episode
    from lightrl.environments.observation import ObservationEncoder
    from lightrl.environments.play import Player
    from lightrl.environments.steps import StepRunner
    from lightrl.types import Prompt

    how = Episodes(Tool, max_turns=TURNS[1], max_turn_tokens=turn_tokens)
    prompts = [Prompt([100 + i], columns={"prompt": ""}, index=i) for i in which]
    episodes: list[Episode] = [Episode(p.index, p, p.index, how, 400, (STOP,)) for p in prompts]
    steps: StepRunner = StepRunner(how.step_timeout, how.max_steps_at_once)
    words: Any = Words()
    with session as engine:
        started = time.perf_counter()
        Player(engine, steps, ObservationEncoder(words), words).play(episodes)
        seconds = time.perf_counter() - started
    steps.close()
    broken = [e.error for e in episodes if e.error is not None or len(e.turns) != len(SHAPES[e.key])]
    if broken:
        raise RuntimeError(f"{len(broken)} episodes were not played to their end") from broken[0]
    return seconds


def longest() -> int:
    """The episode that takes longest by itself."""
    return max(range(EPISODES), key=lambda i: sum(SHAPES[i]) * STEP_SECONDS + (len(SHAPES[i]) - 1) * TOOL_SECONDS)


@contextmanager
def vllm_sessions() -> Any:
    """Yield a function that opens a session of a tiny model in the real vLLM on this machine."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from lightrl.engines.vllm import VLLMEngine
    from lightrl.types import Sampling

    cuda = torch.cuda.is_available()
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        eos_token_id=STOP,
    )
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    options: dict[str, Any] = {"max_model_len": 512, "engine_args": {"max_num_seqs": EPISODES}}
    engine = VLLMEngine(Qwen3ForCausalLM(config), local_rank=0, device=device, dtype=torch.float32, **options)
    try:
        yield lambda: engine.session(Sampling(400, stop_token_ids=(STOP,)), 0)
    finally:
        engine.close()


def judge(rows: dict[str, tuple[float, float]]) -> Result:
    """``rows``: name to seconds of all episodes and of the longest alone; the first has the bar."""
    alone = [sum(shape) * STEP_SECONDS + (len(shape) - 1) * TOOL_SECONDS for shape in SHAPES]
    table = [f"{'64 episodes, 50 ms tools':44}{'all':>8}{'longest':>9}{'ratio':>7}   (seconds)"]
    for name, (wall, one) in rows.items():
        table.append(f"{name:44}{wall:>8.2f}{one:>9.2f}{wall / one:>7.2f}")
    table.append(f"{'steady engine, one after another (computed)':44}{sum(alone):>8.2f}{max(alone):>9.2f}")
    table.append("(best of 3; steady: a decode step takes 5 ms, whatever the batch; 2 to 6 turns of 4 to 40 tokens)")
    wall, one = next(iter(rows.values()))
    ratio = wall / one
    return Result(f"{ratio:.2f}x the longest episode", f"<= {BAR}x", ratio <= BAR, "\n".join(table))


def main() -> Result:
    from benchmarks.__main__ import has_vllm

    def measure(session: Callable[[], Any], **options: Any) -> tuple[float, float]:
        everyone = list(range(EPISODES))
        runs = [(play(session(), everyone, **options), play(session(), [longest()], **options)) for _ in range(ROUNDS)]
        return min(wall for wall, _ in runs), min(one for _, one in runs)  # what other programs add is not ours

    rows = {
        "steady engine, as they come": measure(lambda: nullcontext(SteadyEngine(in_rounds=False))),
        "steady engine, in rounds": measure(lambda: nullcontext(SteadyEngine(in_rounds=True))),
    }
    if has_vllm():
        with vllm_sessions() as session:
            play(session(), [0], turn_tokens=24)  # the first request of an engine takes longer
            rows["vLLM, tiny model, 24 tokens a turn"] = measure(session, turn_tokens=24)
    return judge(rows)
