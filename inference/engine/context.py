"""The target's cache and the drafter's session for sequences that are decoded together."""

from collections.abc import Sequence

import torch

from inference.draft_tree import DraftTree
from inference.protocol import Budget, Committed, Drafter, DraftSession
from inference.sampling import Sampling
from jakiro.target.adapter import TargetAdapter
from jakiro.target.step import StepInput, StepOutput

PREFILL_CHUNK = 512  # number of prompt tokens per forward pass of the target


class Context:
    """The state of a batch: the target's cache, the drafter's session, and the sequence lengths.

    All tokens of a sequence except the last are in the target's cache, and the last token is the
    root of the next tree. The session may lag behind the cache, because final tokens are passed to
    the session only when trees are about to be drafted. Steps without drafts therefore do not use
    the session.

    Args:
        target: frozen target.
        drafter: drafter whose session is used; None to decode without drafts.
        sampling: options by which tokens are selected.
        batch: number of sequences.
        capacity: largest number of tokens of a sequence, without drafts.
    """

    # The caches are created in inference mode, because otherwise steps would be compiled twice.
    @torch.inference_mode()
    def __init__(
        self,
        target: TargetAdapter,
        drafter: Drafter | None,
        sampling: Sampling,
        batch: int,
        capacity: int,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self._margin = 1 + (drafter.max_nodes if drafter else 0)
        hidden_states = drafter.hidden_states if drafter else ()
        self.cache = target.new_cache(batch, capacity + self._margin, hidden_states)
        self.session: DraftSession | None = None
        if drafter is not None:
            self.session = drafter.new_session(sampling, self.cache.capacity, batch)
        self.lengths = [0] * batch  # number of cached tokens of each sequence

    def read(
        self, token_ids: Sequence[Sequence[int]], offset: int, count: int
    ) -> tuple[StepOutput, list[int]]:
        """Run the target over up to `count` tokens of each sequence.

        Args:
            token_ids: all tokens of each sequence.
            offset: number of tokens to skip after the `lengths` cached tokens of each sequence,
                because earlier calls have already read them.
            count: number of tokens to read from the longest sequence; shorter sequences are padded.

        Returns:
            The target's output, and the number of tokens read of each sequence.
        """
        starts = [length + offset for length in self.lengths]
        ends = [start + count for start in starts]
        read = [list(ids[a:b]) for ids, a, b in zip(token_ids, starts, ends, strict=True)]
        padded = [[*ids, *[0] * (count - len(ids))] for ids in read]
        # Padding is written to slots that the sequence overwrites before any token attends to them.
        step = self._chain(padded, starts)
        return self.target.forward(step, self.cache), [len(ids) for ids in read]

    def propose(
        self,
        token_ids: Sequence[list[int]],
        budget: Budget,
        generators: Sequence[torch.Generator],
    ) -> DraftTree:
        """Return trees below the last token of each sequence; all other tokens must be cached.

        Args:
            token_ids: all tokens of each sequence.
            budget: limits of every tree.
            generators: random generators of sampled trees, one per sequence.
        """
        assert self.session is not None
        self.catch_up(token_ids)
        return self.session.propose(budget, generators)

    def catch_up(self, token_ids: Sequence[list[int]]) -> None:
        """Let the session process all cached tokens that it has not processed yet."""
        assert self.session is not None
        while (starts := self.session.lengths) != tuple(self.lengths):
            ends = [
                min(length, start + PREFILL_CHUNK)
                for length, start in zip(self.lengths, starts, strict=True)
            ]
            self.session.advance(self._committed(token_ids, starts, ends))

    def commit(self, sources: Sequence[Sequence[int]]) -> None:
        """Make the tokens at the slots `sources` of each sequence permanent."""
        self._move(sources)
        pairs = zip(self.lengths, sources, strict=True)
        self.lengths = [length + len(slots) for length, slots in pairs]

    def rollback(self, length: int) -> None:
        """Discard everything from position `length` on."""
        self.lengths = [min(own, length) for own in self.lengths]
        if self.session is not None:
            self.session.rollback(length)

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Keep only the sequences at these batch indices, in this order."""
        self.cache.select_sequences(indices)
        self.lengths = [self.lengths[index] for index in indices]
        if self.session is not None:
            self.session.select_sequences(indices)

    def append_sequences(self, other: "Context") -> None:
        """Add copies of the sequences of another context of the same target and drafter.

        Both sessions must have processed all cached tokens. Afterwards, the other context may only
        be closed.
        """
        self.cache.append_sequences(other.cache)
        self.lengths = [*self.lengths, *other.lengths]
        if self.session is not None and other.session is not None:
            self.session.append_sequences(other.session)

    @torch.inference_mode()
    def reserve(self, capacity: int) -> None:
        """Make room for sequences of `capacity` tokens; if a cache grows, it at least doubles."""
        needed = capacity + self._margin
        if needed > self.cache.capacity:
            self.cache.reserve(max(needed, 2 * self.cache.capacity))
            if self.session is not None:
                self.session.reserve(self.cache.capacity)

    def close(self) -> None:
        """Free the cache and the session."""
        if self.session is not None:
            self.session.close()
        del self.cache, self.session

    def _chain(self, token_ids: list[list[int]], starts: Sequence[int]) -> StepInput:
        """Return the input of a target step over consecutive tokens of each sequence."""
        device = self.target.device
        ids, lengths = torch.tensor(token_ids, device=device), torch.tensor(starts, device=device)
        slots = lengths[:, None] + torch.arange(ids.shape[1], device=device)
        end, limit = max(starts) + ids.shape[1], self.target.spec.max_position
        positions = slots
        if end > min(limit, self.cache.capacity):  # only padding can exceed these limits
            positions = slots.clamp(max=limit - 1)
            slots = slots.clamp(max=self.cache.capacity - 1)
        return StepInput(
            token_ids=ids,
            positions=positions,
            slots=slots,
            lengths=lengths,
            highest_slot=min(end, self.cache.capacity) - 1,
        )

    def _committed(
        self, token_ids: Sequence[list[int]], starts: Sequence[int], ends: Sequence[int]
    ) -> Committed:
        """Return the cached tokens from `starts` to `ends`, with the drafter's memory of them."""
        assert self.drafter is not None
        spans = list(zip(token_ids, starts, ends, strict=True))
        width = max(end - start for _, start, end in spans)
        verified = [[*ids[a:b], *[0] * (width - (b - a))] for ids, a, b in spans]
        step = self._chain(verified, starts)
        memory = None
        if "memory" in self.drafter.needs:
            nothing = torch.empty(*step.slots.shape, 0, device=step.slots.device)  # no features
            memory = self.drafter.encode_memory(StepOutput(nothing, step, self.cache))
        return Committed(
            base_length=tuple(ends),
            num_verified=tuple(end - start for _, start, end in spans),
            token_ids=step.token_ids,
            root=torch.tensor([[ids[end]] for ids, _, end in spans], device=step.slots.device),
            memory=memory,
        )

    def _move(self, sources: Sequence[Sequence[int]]) -> None:
        """Move cached tokens to the slots that equal their positions, if necessary."""
        pairs = list(zip(self.lengths, sources, strict=True))
        if all(list(slots) == list(range(start, start + len(slots))) for start, slots in pairs):
            return
        width = max(map(len, sources))
        # Padding copies a slot onto itself.
        padded = [[*slots, *[start] * (width - len(slots))] for start, slots in pairs]
        final = [
            [*range(start, start + len(slots)), *[start] * (width - len(slots))]
            for start, slots in pairs
        ]
        device = self.target.device
        self.cache.move(torch.tensor(padded, device=device), torch.tensor(final, device=device))
