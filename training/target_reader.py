"""The frozen target as training sees it: it reads batches, and turns features into laws."""

import torch
from torch import nn

from jakiro.cache import SlotCache
from jakiro.draft_head import DraftHead
from jakiro.drafter import JakiroDrafter
from jakiro.target import TargetAdapter
from jakiro.target_tail import TargetTail
from training.batch import Batch
from training.features.states import view_of
from training.features.store import FeatureStore
from training.laws import Heads
from training.views import TargetView, look_at_target, states_kept


class TargetReader:
    """Reads batches with the frozen target, into a cache that is used over and over.

    Args:
        target: the frozen target; it may compute in another dtype than the drafter.
        drafter: for which it is read.
        row_length: tokens of a row.
        dtype: what the drafter computes in.
        features: what the target said of all rows; None to run it. Its embeddings, its head, and
            its last layers if the drafter's output goes through them, are needed in any case.

    Raises:
        TargetNotSupported: the drafter needs the target's last layers, which cannot be had alone.
    """

    def __init__(
        self,
        target: TargetAdapter,
        drafter: JakiroDrafter,
        row_length: int,
        dtype: torch.dtype,
        features: FeatureStore | None = None,
    ) -> None:
        self._target = target
        self._sources = drafter.state_sources
        self._row_length = row_length
        self._features = features
        self.dtype = dtype
        num_tail = drafter.config.settings.tail_layers
        self.tail = TargetTail(target, num_tail) if num_tail else None
        self.heads = Heads.of(DraftHead(target, drafter.draft_ids))
        self._caches: dict[int, SlotCache] = {}  # by the number of rows

    def view(self, batch: Batch) -> TargetView:
        """Return what the target says of a batch, in the drafter's dtype."""
        if self._features is not None:
            return self._recalled(batch, self._features).to(self.dtype)
        cache = self._cache_for(batch.token_ids.shape[0])
        view = look_at_target(self._target, batch, self._sources, cache, self.tail)
        return view.to(self.dtype)

    @torch.no_grad()
    def _recalled(self, batch: Batch, features: FeatureStore) -> TargetView:
        """Return what the target said of a batch when its features were written."""
        target = self._target
        kept = features.read(batch.numbers.tolist())
        parts = {name: part.to(target.device, target.dtype) for name, part in kept.items()}
        return view_of(parts, target.embed(batch.token_ids), self._sources, self.tail)

    def _cache_for(self, num_rows: int) -> SlotCache:
        if num_rows not in self._caches:
            self._caches[num_rows] = self._target.new_cache(
                num_rows, self._row_length, states_kept(self._sources, self.tail)
            )
        return self._caches[num_rows]


def place_target(target: TargetAdapter, device: torch.device, *, needs_layers: bool) -> None:
    """Move the target to where training computes; its layers only if they are going to run."""
    model: nn.Module = target.model
    ends = (target.model.get_input_embeddings(), target.model.get_output_embeddings())
    if needs_layers:
        model.to(device)
        return
    model.to("cpu")
    for part in ends:
        part.to(device)
