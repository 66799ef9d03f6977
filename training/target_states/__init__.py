"""Target states on disk: what the target computes for the training data, written once."""
