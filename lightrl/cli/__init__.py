"""The command ``lightrl``."""
