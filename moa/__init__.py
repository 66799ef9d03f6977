"""Mixture of attentions: plain modules that attend over the layers and the tokens of a target."""
