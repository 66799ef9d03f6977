"""Shapes of draft trees, and their growth level by level."""

MAX_PASSES = 16  # largest number of drafter passes for one tree
MOST_CANDIDATES = 4096  # larger trees take gigabytes, and are never faster
