"""Lanes whose decoding steps start before the host has read the result of the previous step."""

from collections.abc import Sequence
from typing import Any

from inference.engine.captured_batch import CapturedBatch
from inference.engine.lane import Lane
from inference.engine.request import SequenceState


class CapturedLane(CapturedBatch, Lane):
    """A lane whose decoding steps are recorded as CUDA graphs on a GPU (see `CapturedBatch`)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        cache = self.context.cache
        per_slot = self.num_bytes // cache.capacity
        self.context.reserve(self.capacity + self._most_per_step, doubles=False)
        self.num_bytes = per_slot * cache.capacity

    def remove(self, sequences: Sequence[SequenceState]) -> None:
        """Free the places of sequences between two steps.

        Complete sequences leave by themselves after the step that is under way, which is discarded
        only if any other sequence has a place.
        """
        gone = {id(state) for state in sequences}
        if any(id(state) in gone and not state.is_finished for state in self.live):
            self._discard_step()
            super().remove(sequences)

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.forget_steps()
        super().close()
