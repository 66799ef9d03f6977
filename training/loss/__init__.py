"""Anchors, the drafter's passes over packed sequences, and the training objective."""
