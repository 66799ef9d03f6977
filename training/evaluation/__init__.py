"""Metrics of a run: validation losses, tau measured by decoding, curves of several runs."""
