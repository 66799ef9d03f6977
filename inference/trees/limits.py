"""Limits of draft trees. Importing them is fast, for checks before the models are loaded."""

MAX_PASSES = 16  # largest number of drafter passes for one tree
MOST_CANDIDATES = 4096  # larger trees take gigabytes, and are never faster
