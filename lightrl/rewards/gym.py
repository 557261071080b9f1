"""The scorers of ``reasoning-gym`` tasks (extra ``gym``)."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def gym_score(completion: str, *, data_source: str, entry: dict[str, Any], gym_config: dict[str, Any]) -> float:
    """Score a completion as the task itself does, mostly from 0 to 1.

    The answer is what the last ``<answer>...</answer>`` holds, or the whole completion where there is none. The other
    arguments are columns of the rows of :func:`lightrl.prompts.gym_rows`.
    """
    found = _ANSWER.findall(completion)
    answer = (found[-1] if found else completion).strip()
    return float(_task(data_source, json.dumps(gym_config, sort_keys=True, default=str)).score_answer(answer, entry))


@cache
def _task(name: str, config: str) -> Any:
    from lightrl.prompts.named import gym_task

    return gym_task(name, size=1, seed=0, **json.loads(config))
