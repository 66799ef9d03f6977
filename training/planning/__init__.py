"""Estimates of the memory, disk and time of a run."""
