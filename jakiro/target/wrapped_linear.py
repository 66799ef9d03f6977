"""A linear layer that computes its products in another way than PyTorch does by default."""

from torch import Tensor, nn


class WrappedLinear(nn.Module):
    """Base class of modules that replace a linear layer and use its weight and bias."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    @property
    def weight(self) -> Tensor:
        """The layer's own weight, shape [out_features, in_features]."""
        return self.layer.weight

    @property
    def bias(self) -> Tensor | None:
        """The layer's own bias, shape [out_features]; None if there is none."""
        return self.layer.bias
