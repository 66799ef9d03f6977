"""Estimates of a run's memory, disk space and time, and measurements of its speed."""
