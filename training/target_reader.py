"""The frozen target as training sees it: it reads batches, and turns features into laws."""

import torch
from torch import Tensor

from jakiro.cache import SlotCache, StateSource
from jakiro.target import TargetAdapter
from training.batch import Batch
from training.views import TargetView, look_at_target


class TargetReader:
    """Reads batches with the frozen target, into a cache that is used over and over.

    Args:
        target: the frozen target; it may compute in another dtype than the drafter.
        source: what of the target's state the drafter's memory is made of.
        row_length: tokens of a row.
        dtype: what the drafter computes in.
    """

    def __init__(
        self, target: TargetAdapter, source: StateSource, row_length: int, dtype: torch.dtype
    ) -> None:
        self._target = target
        self._source = source
        self._row_length = row_length
        self.dtype = dtype
        self._caches: dict[int, SlotCache] = {}  # by the number of rows

    def view(self, batch: Batch) -> TargetView:
        """Return what the target says of a batch, in the drafter's dtype."""
        cache = self._cache_for(batch.token_ids.shape[0])
        view = look_at_target(self._target, batch, self._source, cache)
        return TargetView(*(part.to(self.dtype) for part in view))

    def logits(self, features: Tensor) -> Tensor:
        """Return the target's logits of features of the drafter's dtype."""
        # Contiguous, else a linear layer becomes many small products: four times slower on a CPU.
        return self._target.logits(features.to(self._target.dtype).contiguous())

    def _cache_for(self, num_rows: int) -> SlotCache:
        if num_rows not in self._caches:
            self._caches[num_rows] = self._target.new_cache(
                num_rows, self._row_length, self._source.hidden_states
            )
        return self._caches[num_rows]
