"""Target states on disk: hidden states, keys and values for the training data, computed once."""
