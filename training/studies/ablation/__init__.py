"""Ablation studies: arms of equal size, paired intervals, tables."""
