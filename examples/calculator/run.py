"""Teach a tiny model to use a calculator: ``python -m examples.calculator.run``."""

from __future__ import annotations

import argparse
import itertools
import os
import random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a model this small only waits for a second thread

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from examples.tiny.curve import draw_curve
from examples.tiny.task import VOCABULARY, make_model, make_tokenizer
from examples.tiny.training import make_parser, make_trainer, train_and_tell
from lightrl import RLModule, RolloutDataModule
from lightrl.environments import Episodes, ToolUse
from lightrl.rewards import exact_match

CALL = '<call> {"name": "multiply" , "arguments": {"a": %d , "b": %d }} </call>'
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' }}"
    "{% if m['tool_calls'] %}{% set f = m['tool_calls'][0]['function'] %}"
    """{{ '<call> {"name": ' + f['name'] | tojson + ', "arguments": ' + f['arguments'] | tojson + '} </call>' }}"""
    "{% else %}{{ m['content'] }}{% endif %}{{ eos_token if m['role'] == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
WORDS = list(dict.fromkeys([*VOCABULARY, "<tool>", "*", *CALL.replace("%d", "0").split(), *map(str, range(82))]))
PAIRS = list(itertools.product(range(2, 10), repeat=2))
RIGHT = 0.3  # share of the demonstrations that call the tool with the right numbers


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


TOOLS = ToolUse([multiply])


def main() -> None:
    """Show the model the form of a call, then let it find out by rewards what to call with."""
    args = _arguments()
    seed_everything(args.seed, verbose=False)
    logger = TensorBoardLogger(args.out, name="")
    tokenizer, model = make_parts(args.seed)
    imitate(model, tokenizer, args.warm_up_steps)
    train, test = split(args.seed)

    module = RLModule(model, lr=3e-4)
    data = RolloutDataModule(
        train * 4,
        reward=exact_match,
        environment=Episodes(TOOLS, max_turns=3, max_turn_tokens=16),
        group_size=16,
        prompts_per_step=32,
        max_completion_tokens=40,  # of a whole episode
        val_prompts=test,
        val_group_size=8,
        val_temperature=1.0,  # the likeliest call is right from the start: what is learnt is to be sure of it
        tokenizer=tokenizer,
    )
    trainer = make_trainer(args.strategy, args.max_steps, samples_every=20, val_check_interval=5, logger=logger)
    train_and_tell(trainer, module, data, lambda: draw_curve(logger.log_dir, title="Calculator"))


def make_parts(seed: int) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    """Return the tokenizer and the untrained model."""
    said = [*VOCABULARY, "<tool>", "*", *CALL.replace("%d", "0").split(), *map(str, range(82))]
    words = list(dict.fromkeys(said))
    return make_tokenizer(words, CHAT_TEMPLATE), make_model(seed, words)


def split(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and held-out rows: no product of the same two numbers in the same order is in both."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{a} * {b}"}], "answer": str(a * b)}
        for a, b in random.Random(seed).sample(PAIRS, len(PAIRS))
    ]
    return rows[:-16], rows[-16:]


def imitate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    """Train on demonstrations whose form is right: a call, its result, the result repeated. Most multiply the wrong."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        texts = []
        for a, b in rng.choices(PAIRS, k=64):
            c, d = (a, b) if rng.random() < RIGHT else rng.choice(PAIRS)
            called = CALL % (c, d)
            texts.append(f"<user> {a} * {b} <assistant> {called} <eos> <tool> {c * d} <assistant> {c * d} <eos>")
        ids = tokenizer(texts, return_tensors="pt")["input_ids"]
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _arguments() -> argparse.Namespace:
    parser = make_parser("calculator", __doc__, max_steps=30, seed="of the weights and of sampling")
    parser.add_argument("--warm-up-steps", type=int, default=300, help="steps of imitation before")
    return parser.parse_args()


if __name__ == "__main__":
    main()
