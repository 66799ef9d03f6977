"""Micro-benchmarks of the decode engine."""
