"""The parts of lightrl in loops of one's own, without a Trainer."""
