"""Metrics of a run: validation losses, tau measured by decoding, and curves of several runs."""
