"""Environments, chat tokenizers and a watch on rollouts, for tests of episodes."""

from typing import Any

from lightning.pytorch import Callback
from transformers import PreTrainedTokenizerFast

from lightrl import RLModule
from lightrl.distributed import rank
from lightrl.environments import Done, Turn
from lightrl.types import Prompt, Rollout
from tests.helpers.fits import plain_copy
from tests.helpers.tiny import tiny_tokenizer
from tests.helpers.training import quiet_trainer, tiny_data, tiny_module

CHAT = (
    "{% for m in messages %}{{ {'user': 'w3 ', 'tool': 'w4 ', 'assistant': 'w5 '}[m['role']] }}{{ m['content'] }}"
    "{{ eos_token if m['role'] == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w5' }}{% endif %}"
)


def chat_tokenizer(template: str = CHAT) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def chats(n: int = 8) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"w{6 + i}"}], "answer": f"w{6 + i}"} for i in range(n)]


class Echo:
    """Says how many turns there were, in words of the tiny vocabulary; ends after a number of turns."""

    turns = 3
    made: list["Echo"] = []

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.seen: list[Turn] = []
        type(self).made.append(self)

    def step(self, turn: Turn) -> Any:
        self.seen.append(turn)
        if len(self.seen) == self.turns:
            return Done(reward=float(sum(t.token_ids[0] % 2 == 0 for t in self.seen)))
        return " ".join(["w9", "w10", "w11"][: len(self.seen)])


class Uneven(Echo):
    """Ends at once on rank 0, and late on the others."""

    made: list[Echo] = []

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.turns = 1 if rank() == 0 else 4


class Rollouts(Callback):
    """Keeps every rollout that was trained on or validated, with a copy of the policy that made it."""

    def __init__(self, copies: bool = False) -> None:
        self.trained: list[list[Rollout]] = []
        self.validated: list[Rollout] = []
        self.policies: list[Any] = []
        self.logged: list[dict[str, float]] = []
        self.copies = copies

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.trained.append(list(batch.rollouts))
        if self.copies:
            self.policies.append(plain_copy(module))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self.validated += batch.rollouts


def play(environment: Any, module: RLModule | None = None, *, prompts: Any = None, **args: Any) -> Rollouts:
    """Fit one step or as many as are asked for and return what was trained on."""
    watch = Rollouts(copies=True)
    trainer = {"max_steps": args.pop("max_steps", 1), "strategy": args.pop("strategy", "colocated_hf")}
    data = tiny_data(prompts, args.pop("reward", None), environment=environment, **{"max_completion_tokens": 24} | args)
    quiet_trainer(callbacks=[watch], **trainer).fit(module or tiny_module(), data)
    return watch


def turns_of(rollout: Rollout) -> list[tuple[int, int, bool]]:
    """(start, end, of the model) of each piece of a completion, by its loss mask."""
    mask = rollout.loss_mask.tolist()
    cuts = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    return [(a, b, mask[a]) for a, b in zip(cuts, cuts[1:], strict=False)]
