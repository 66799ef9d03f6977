"""Ablation studies: trained variants (arms) of equal size, compared with paired intervals."""
