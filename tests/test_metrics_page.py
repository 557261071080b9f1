"""The page of metrics defines every key that is logged, and no others."""

import re
from pathlib import Path
from typing import Any

from lightrl import callbacks
from lightrl.algorithms import PPO
from lightrl.corrections import TruncatedToken
from tests.helpers.tiny import tiny_model, tiny_prompts
from tests.helpers.training import quiet_trainer, tiny_data

PAGE = Path(__file__).parent.parent / "docs/metrics.md"
ELSEWHERE = {"train/skipped_steps", "rollout/turns_mean", "rollout/sampling_rounds", "time/wait"}
"""Logged by other kinds of runs; their own tests name them."""


def defined() -> set[str]:
    return set(re.findall(r"`([a-z]+/[\w@<>]+)`", PAGE.read_text()))


def logged() -> set[str]:
    watchers: list[Any] = [
        callbacks.KLMonitor(),
        callbacks.AdaptiveKL(0.1),
        callbacks.StalenessMonitor(),
        callbacks.ThroughputMonitor(1e12, 1e11),
        callbacks.RolloutEvaluation([1, 2]),
    ]
    rewards = {"name": lambda completion: len(completion) % 3, "other": lambda completion: 1.0}
    trainer = quiet_trainer(max_steps=2, callbacks=watchers, val_check_interval=2, check_val_every_n_epoch=None)
    module = PPO(tiny_model(), lr=1e-3, kl_coef=0.1, correction=TruncatedToken())
    trainer.fit(module, tiny_data(reward=rewards, val_prompts=tiny_prompts(2)))
    return set(trainer.callback_metrics)


def test_every_key_is_defined() -> None:
    patterns = [re.escape(key).replace("<name>", ".+") for key in defined()]
    patterns = [re.sub(r"@[NK]$", r"@\\d+", pattern) for pattern in patterns]
    found = logged()
    assert not [key for key in found if not any(re.fullmatch(p, key) for p in patterns)]
    assert {p for p in patterns if not any(re.fullmatch(p, key) for key in found)} == set(map(re.escape, ELSEWHERE))
