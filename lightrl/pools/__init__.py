"""Engines in processes of their own, seen from the trainer: connections, launchers, and the pool that minds them."""
