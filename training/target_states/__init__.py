"""Target states on disk: states of the target for the training data, written once."""
