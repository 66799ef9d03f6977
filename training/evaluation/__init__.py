"""Metrics of a run: validation losses and tau measured by decoding."""
