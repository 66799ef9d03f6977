"""Levels of draft trees: their numbers, and networks that predict several levels in one pass."""
