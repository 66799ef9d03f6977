"""Metrics of a run: validation losses, tau by real decoding, learning curves."""
