"""Environments: episodes of several turns, tokens in and tokens out."""

from lightrl.environments.base import Done, Environment, Episodes, Turn
from lightrl.environments.tools import ToolUse

__all__ = ["Done", "Environment", "Episodes", "ToolUse", "Turn"]
