"""Lanes whose decoding steps start before the host has read the result of the previous step."""

from collections.abc import Sequence
from typing import Any

from inference.engine.captured_batch import CapturedBatch
from inference.engine.decode_step import DecodeStep
from inference.engine.lane import Lane
from inference.engine.prefill import Prefill
from inference.engine.request import SequenceState


class CapturedLane(CapturedBatch, Lane):
    """A lane whose decoding steps are recorded as CUDA graphs on a GPU (see `CapturedBatch`).

    Args:
        *args: arguments of `Lane`.
        **options: arguments of `Lane`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        cache = self.context.cache
        per_slot = self.num_bytes // cache.capacity
        self.context.reserve(self.capacity + self._most_per_step, doubles=False)
        self.num_bytes = per_slot * cache.capacity

    def start(self, prefill: Prefill, sequences: Sequence[SequenceState]) -> list[DecodeStep]:
        """Emit first tokens, and move sequences that go on into free places, as `Lane.start` does.

        Args:
            prefill: complete prefill of the prompt, whose context is closed.
            sequences: sequences that continue the prompt.
        """
        self._discard_step()
        return super().start(prefill, sequences)

    def remove(self, sequences: Sequence[SequenceState]) -> None:
        """Free the places of sequences between two steps.

        If all of them are complete, they leave by themselves after the step that is under way.

        Args:
            sequences: sequences, some of which may have left already.
        """
        if any(not state.is_finished for state in sequences):
            self._discard_step()
            super().remove(sequences)

    def close(self) -> None:
        """Free the recorded steps and the caches."""
        if self._pipeline is not None:
            self._pipeline.forget_steps()
        super().close()
