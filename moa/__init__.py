"""Attention modules over the layers and the tokens of a target (Mixture of Attentions)."""
