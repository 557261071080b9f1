"""Prompts: rows from any source, tokenised once, in a resumable order.

Left out: cutting long prompts. A cut prompt is another prompt (its role markers go first), so long ones are refused
or dropped.
"""

from lightrl.prompts.chat import stop_token_ids, tokenize_prompts
from lightrl.prompts.curriculum import Curriculum, CurriculumOrder
from lightrl.prompts.mixture import MixedOrder, weighted_sources
from lightrl.prompts.named import gym_rows
from lightrl.prompts.order import PromptOrder
from lightrl.prompts.rows import ground_truth, load_rows

__all__ = [
    "Curriculum",
    "CurriculumOrder",
    "MixedOrder",
    "PromptOrder",
    "ground_truth",
    "gym_rows",
    "load_rows",
    "stop_token_ids",
    "tokenize_prompts",
    "weighted_sources",
]
