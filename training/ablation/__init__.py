"""Ablations: the same training with one thing changed, compared at equal size."""
