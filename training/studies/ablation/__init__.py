"""Ablation studies: training and paired comparison of drafter variants (arms) of equal size."""
