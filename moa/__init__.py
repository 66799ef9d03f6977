"""Attention modules over the layers and the tokens of a target (Mixture of Attentions).

The names of their variants are here, so that settings can use them without importing torch.
"""

from typing import Literal

AttentionBias = Literal["none", "qkv", "all"]
FusionNorm = Literal["none", "each", "all"]
InputKind = Literal["join", "wide"]
PredictsFrom = Literal["all", "masks"]
Residual = Literal["feature", "normed"]
TokenInput = Literal["single", "trigram"]
