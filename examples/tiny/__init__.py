"""The demo: a tiny model learns, from nothing, to name the largest of three digits."""
