"""Two drafters that share one tree."""
