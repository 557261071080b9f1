"""Rewards: functions that score completions, summed with weights, each call with a deadline."""

from lightrl.rewards.base import RewardFunction, RewardSpec, RewardTerm, import_reward, make_terms
from lightrl.rewards.builtin import boxed_match, exact_match, numeric_match
from lightrl.rewards.extract import boxed_answer, hash_answer
from lightrl.rewards.total import RewardSum, Score

__all__ = [
    "RewardFunction",
    "RewardSpec",
    "RewardSum",
    "RewardTerm",
    "Score",
    "boxed_answer",
    "boxed_match",
    "exact_match",
    "hash_answer",
    "import_reward",
    "make_terms",
    "numeric_match",
]
