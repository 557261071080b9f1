"""Rewards: functions that score completions, summed with weights, each call with a deadline."""

from lightrl.rewards.base import RewardFunction, RewardSpec, RewardTerm, import_reward, make_terms
from lightrl.rewards.builtin import boxed_match, exact_match, hash_match, numeric_match
from lightrl.rewards.extract import boxed_answer, hash_answer
from lightrl.rewards.gym import gym_score
from lightrl.rewards.killable import KillableReward
from lightrl.rewards.mathematics import MathMatch, math_match
from lightrl.rewards.remote import HTTPReward, Judge
from lightrl.rewards.reward_model import RewardModel
from lightrl.rewards.shape import FormatMatch, LengthPenalty, RepetitionPenalty
from lightrl.rewards.total import RewardSum, Score

__all__ = [
    "FormatMatch",
    "HTTPReward",
    "Judge",
    "KillableReward",
    "LengthPenalty",
    "MathMatch",
    "RepetitionPenalty",
    "RewardModel",
    "gym_score",
    "hash_match",
    "math_match",
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
