"""Rewards for the tests that need one by import path or in another process."""

import time


def spin(completion: str) -> float:
    while "bad" in completion:
        pass
    return 1.0


def sleep(completion: str) -> float:
    if "bad" in completion:
        time.sleep(3600)
    return 1.0


class Grader:
    async def __call__(self, completion: str) -> float:
        return float(len(completion))


grader = Grader()
