"""Estimates of a run's memory, disk space and time, and the settings of a first run."""
