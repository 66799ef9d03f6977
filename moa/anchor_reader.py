"""What the last verified token tells every drafted position directly."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

LONGEST = 16  # distances from here on are alike


class AnchorReader(nn.Module):
    """Joins the memory of the anchor, the last verified token, to each query's stream.

    A feedback trunk is told the feature of the position before (EAGLE, arXiv 2401.15077), which it
    has to predict itself as soon as it drafts further. Here every position of a draft is told the
    target's own state of the same token, and how far away that is, so nothing is ever fed back.

    Args:
        hidden: width of the stream and of memory.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.stream_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.memory_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.distance = nn.Embedding(LONGEST + 1, hidden)
        nn.init.normal_(self.distance.weight, std=0.02)

    def forward(
        self,
        stream: Float[Tensor, "batch queries hidden"],
        anchor: Float[Tensor, "batch queries hidden"],
        distance: Int[Tensor, "#batch queries"],
    ) -> Float[Tensor, "batch queries hidden"]:
        """Return the stream with what the anchor adds to it.

        Args:
            stream: of the queries.
            anchor: memory of each query's anchor.
            distance: from there to the query, in positions.
        """
        both = torch.cat((self.stream_norm(stream), self.memory_norm(anchor)), dim=-1)
        return stream + self.join(both) + self.distance(distance.clamp(max=LONGEST))
