"""Target states on disk: hidden states, keys and values of the training data, computed once."""
