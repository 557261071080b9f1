"""Weights on their way from the sharded policy to an engine."""
