"""Ablation studies: training and paired comparison of equally large drafter variants (arms)."""
