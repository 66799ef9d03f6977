"""One trained mask per parallel level, which the trunk reads (ParallelSpec, arXiv 2410.05589)."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jakiro.experts import ExpertsOutput
from moa.attention import KV, KVStore, Stores
from moa.trunk import Trunk, TrunkInputs


class LevelMasks(nn.Module):
    """Runs trunk and experts once, for queries and for the masks behind each query.

    Masks take the places of tokens that are not drafted yet. Each has a trained embedding, and a
    trained vector in place of the feature that is not known:

        position            i            i + 1     i + 2
        token               x_i          m_1       m_2
        feature             f_{i-1}      g_1       g_2
        the output predicts f_i          f_{i+1}   f_{i+2}

    A mask attends to all that its query attends to, to itself, and to the masks before it behind
    the same query. Queries attend to no mask, and the keys and values of masks are not stored. The
    components of all levels have the weights that the router gives them at the query.
    """

    def __init__(self, hidden: int, num_levels: int, reads_features: bool) -> None:
        super().__init__()
        self.num_levels = num_levels
        self.tokens = nn.Parameter(0.02 * torch.randn(num_levels, hidden))
        self.features = (
            nn.Parameter(0.02 * torch.randn(num_levels, hidden)) if reads_features else None
        )

    def forward(
        self,
        trunk: Trunk,
        experts: Callable[[Tensor], ExpertsOutput],
        embeddings: Float[Tensor, "batch queries hidden"],
        positions: Int[Tensor, "batch queries"],
        self_mask: Bool[Tensor, "batch 1 queries keys"],
        inputs: TrunkInputs,
        store: Stores,
    ) -> ExpertsOutput:
        """Return the predicted features of all levels for each query."""
        count, ahead = embeddings.shape[1], torch.arange(1 + self.num_levels).to(positions)
        stream = trunk(
            self._with_masks(embeddings, self.tokens),
            torch.cat((positions, (positions[:, :, None] + ahead[1:]).flatten(1)), dim=1),
            self._own_mask(self_mask),
            self._inputs(inputs),
            tuple(_stored_up_to(count, own) for own in trunk.stores(store)),
        )
        masks = stream[:, count:].unflatten(1, (count, self.num_levels))
        output = experts(torch.cat((stream[:, :count, None], masks), dim=2))
        return ExpertsOutput(
            output.features[..., 0, :, :], output.log_weights[:, :, 0], output.gate[:, :, 0]
        )

    def _with_masks(self, vectors: Tensor, masks: Tensor) -> Tensor:
        """Return the vectors of queries, followed by the masks behind each query."""
        batch, count, _ = vectors.shape
        behind = masks.to(vectors.dtype).expand(batch, count, -1, -1)
        return torch.cat((vectors, behind.flatten(1, 2)), dim=1)

    def _own_mask(self, visible: Tensor) -> Tensor:
        """Return the mask of self-attention: the keys are those of the store, then the masks."""
        count = visible.shape[2]
        own = group_mask(count, self.num_levels, visible.device)
        own = torch.cat((own.new_zeros(count, len(own)), own))
        return torch.cat((self._behind(visible), own.expand(len(visible), 1, -1, -1)), dim=3)

    def _inputs(self, inputs: TrunkInputs) -> TrunkInputs:
        previous, mask = inputs.previous, inputs.mask
        if previous is not None and self.features is not None:
            previous = self._with_masks(previous, self.features)
        mask = None if mask is None else self._behind(mask)
        return inputs._replace(previous=previous, mask=mask)

    def _behind(self, visible: Tensor) -> Tensor:
        """Return what queries may attend to, followed by the same for the masks behind them."""
        return torch.cat((visible, visible.repeat_interleave(self.num_levels, dim=2)), dim=2)


def _stored_up_to(count: int, store: KVStore) -> KVStore:
    """Return a store that keeps the first `count` keys and values, and appends the others."""

    def join(kv: KV) -> KV:
        kept = store(KV(kv.keys[:, :, :count], kv.values[:, :, :count]))
        pairs = zip(kept, kv, strict=True)
        return KV(*(torch.cat((old, new[:, :, count:]), dim=2) for old, new in pairs))

    return join


def group_mask(count: int, levels: int, device: torch.device) -> Bool[Tensor, "rows rows"]:
    """Return True where a row may attend to another one: to its own group, up to itself."""
    earlier = torch.ones(levels, levels, dtype=torch.bool, device=device).tril()
    return torch.block_diag(*[earlier] * count)
