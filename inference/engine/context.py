"""The target's cache and the drafter's session for sequences that are decoded together."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.draft_tree import ROOT, DraftTree
from inference.engine.acceptance import AcceptedTokens
from inference.protocol import Budget, Committed, DeviceSession, Drafter, DraftSession
from inference.sampling.batch import BatchSampling
from inference.sampling.grammar import GrammarProcessor
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from jakiro.target import recurrence
from jakiro.target.adapter import TargetAdapter
from jakiro.target.step import StepInput, StepOutput

PREFILL_CHUNK = 512  # number of prompt tokens per forward pass of the target
# On a CPU, this many tokens of a prompt take as long alone as beside others, without padding.
LONG_ON_CPU = 64


def most_per_step(drafter: Drafter | None) -> int:
    """Return the largest number of tokens that a step can emit for a sequence."""
    return 1 + (drafter.max_depth if drafter else 0)


class Context:
    """The state of a batch: the target's cache, the drafter's session, and the sequence lengths.

    All tokens of a sequence except the last are in the target's cache, and the last token is the
    root of the next tree. The session may lag behind the cache, because final tokens are passed to
    the session only when trees are about to be drafted. Steps without drafts therefore do not use
    the session.

    Lengths and roots are kept on the device, too. A commit updates both there, so that the next
    step need not copy anything to the device.
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
        # largest number of tokens per sequence that a decoding step reads
        self.most_queries = 1 + (drafter.max_nodes if drafter else 0)
        if target.spec.is_recurrent:
            self.most_queries += recurrence.MOST_REPLAYED
        hidden_states = drafter.hidden_states if drafter else ()
        self.cache = target.new_cache(batch, capacity + self.most_queries, hidden_states)
        self.session: DraftSession | None = None
        if drafter is not None:
            self.session = drafter.new_session(sampling, self.cache.capacity, batch)
        self.lengths = [0] * batch

    @property
    def lengths(self) -> list[int]:
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self._base: Tensor | None = None
        self._roots: Tensor | None = None
        self._newest: Committed | None = None  # tokens of the last commit, without memory

    @property
    def base_length(self) -> Int[Tensor, " batch"]:
        """The lengths on the device, which are the positions of the roots."""
        if self._base is None:
            self._base = self._on_device(self.lengths)
        return self._base

    @property
    def num_unread(self) -> int:
        """The number of cached tokens, over all sequences, that the session has not processed."""
        if self.session is None:
            return 0
        return max(0, sum(self.lengths) - sum(self.session.lengths))

    @property
    def prefill_chunk(self) -> int:
        """The largest number of prompt tokens per forward pass of the target."""
        return PREFILL_CHUNK

    def roots(self, token_ids: Sequence[list[int]]) -> Int[Tensor, "batch 1"]:
        if self._roots is None:
            self._roots = self._on_device([ids[-1:] for ids in token_ids])
        return self._roots

    def read(
        self, token_ids: Sequence[Sequence[int]], offset: int, count: int
    ) -> list[Float[Tensor, "tokens hidden"]]:
        """Run the target over up to `count` tokens of each sequence, and return their features.

        Sequences without further tokens take no part, and have no features in the result, which has
        one item for each sequence.

        Args:
            offset: number of tokens to skip after the `lengths` cached tokens of each sequence,
                because earlier calls have already read them.
        """
        starts = [length + offset for length in self.lengths]
        ends = [start + count for start in starts]
        read = [list(ids[a:b]) for ids, a, b in zip(token_ids, starts, ends, strict=True)]
        rows = [index for index, ids in enumerate(read) if ids]
        is_on_cpu = self.target.device.type == "cpu"
        long = [index for index in rows if is_on_cpu and len(read[index]) >= LONG_ON_CPU]
        if self.cache.states is not None:
            long = rows  # states would read padding, too
        others = [index for index in rows if index not in long]
        features: dict[int, Tensor] = {}
        for together in [*([index] for index in long), *([others] if others else [])]:
            features |= self._read_together(together, read, starts)
        nothing = features[rows[0]][:0]
        return [features.get(index, nothing) for index in range(len(read))]

    def _read_together(
        self, rows: list[int], read: list[list[int]], starts: list[int]
    ) -> dict[int, Float[Tensor, "tokens hidden"]]:
        width = max(len(read[index]) for index in rows)
        # Padding is written to slots that the sequence overwrites before any token attends to them.
        padded = [[*read[index], *[0] * (width - len(read[index]))] for index in rows]
        first = [starts[index] for index in rows]
        step = self._chain(self._on_device(padded), self._on_device(first), max(first))
        if len(rows) < len(read):
            step = replace(step, rows=self._on_device(rows))
        features = self.target.forward(step, self.cache).features
        if self.cache.states is not None:
            self.cache.states.keep([starts[index] + width for index in rows], rows)
        return {index: features[row, : len(read[index])] for row, index in enumerate(rows)}

    def propose(
        self,
        token_ids: Sequence[list[int]],
        budget: Budget,
        random: StepRandom,
        grammars: Sequence[GrammarProcessor | None] = (),
    ) -> DraftTree:
        """Return trees below the last token of each sequence; all other tokens must be cached.

        The trees are chains if the target is recurrent: the best paths of the drafter's trees.
        """
        assert self.session is not None
        assert self.drafter is not None
        self.catch_up(token_ids)
        if self.cache.states is None:
            return self._draft(token_ids, budget, random, grammars)
        most = self.drafter.max_nodes
        depth = min(budget.num_nodes, most if budget.depth is None else budget.depth)
        return self._draft(token_ids, Budget(most, depth), random, grammars).chain()

    def _draft(
        self,
        token_ids: Sequence[list[int]],
        budget: Budget,
        random: StepRandom,
        grammars: Sequence[GrammarProcessor | None],
    ) -> DraftTree:
        """Return the drafter's trees, without what grammars forbid."""
        assert self.session is not None
        if not grammars:
            return self.session.propose(budget, random)
        for grammar, ids in zip(grammars, token_ids, strict=True):
            if grammar is not None:
                grammar.set_root(ids)
        self.session.constrain(grammars)
        tree = self.session.propose(budget, random)
        self.session.constrain(())
        return _without_forbidden(tree, grammars)

    def verify(
        self, tree: DraftTree, token_ids: Sequence[list[int]]
    ) -> Float[Tensor, "batch queries hidden"]:
        """Return the target's features of the roots and of all candidates, read in one pass."""
        roots, lengths = self.roots(token_ids), self.lengths
        if self.cache.states is not None:
            return self._verify_chains(tree, token_ids, roots)
        start = lengths[0] if len(lengths) == 1 else None
        step = tree.to_step(roots, self.target.spec, max(lengths), start)
        return self.target.forward(step, self.cache).features

    def _verify_chains(
        self, tree: DraftTree, token_ids: Sequence[list[int]], roots: Int[Tensor, "batch 1"]
    ) -> Float[Tensor, "batch queries hidden"]:
        """Read every sequence from the boundary of its states on, up to the end of its chain."""
        states = self.cache.states
        assert states is not None
        starts = states.boundaries
        again = [ids[a:b] for ids, a, b in zip(token_ids, starts, self.lengths, strict=True)]
        for index in range(len(again)):
            if len(again[index]) > recurrence.MOST_REPLAYED:
                self._read_together([index], again, starts)
                again[index] = []
        width = max(map(len, again)) + 1 + tree.num_nodes
        padded = self._on_device([[*ids, *[0] * (width - len(ids))] for ids in again])
        drafted = tree.token_ids.clamp(0, self.target.spec.vocab_size - 1)
        queries = self._on_device([len(ids) for ids in again])[:, None]
        queries = queries + torch.arange(1 + tree.num_nodes, device=queries.device)
        padded = padded.scatter(1, queries, torch.cat((roots, drafted), dim=1))
        step = self._chain(padded, self._on_device(starts), max(starts))
        features = self.target.forward(step, self.cache).features
        return features.gather(1, queries[:, :, None].expand(-1, -1, features.shape[2]))

    def catch_up(self, token_ids: Sequence[list[int]]) -> None:
        """Let the session process all cached tokens that it has not processed yet."""
        assert self.session is not None
        newest = self._newest
        if newest is not None and self.session.lengths == newest.starts:
            self._advance(newest)
        while (starts := self.session.lengths) != tuple(self.lengths):
            ends = tuple(
                min(length, start + PREFILL_CHUNK)
                for length, start in zip(self.lengths, starts, strict=True)
            )
            self._advance(Committed.of(token_ids, starts, ends, self.target.device))

    def commit(self, tree: DraftTree, accepted: AcceptedTokens, counts: Sequence[int]) -> None:
        """Make each root and the first accepted nodes permanent, and keep the new roots.

        Args:
            counts: number of tokens of each sequence that become permanent, including the root.
        """
        nodes = accepted.nodes[:, : max(counts) - 1]
        if not accepted.is_in_order(counts):
            self._move(self.base_length, nodes)
        pairs = zip(self.lengths, counts, strict=True)
        ends = [length + count for length, count in pairs]
        newest = self._accepted(tree, nodes, ends, accepted.next_token)
        self.lengths = ends
        if self.cache.states is not None:
            self.cache.states.keep(ends)
        if accepted.is_emitted(counts):
            self._base, self._roots, self._newest = newest.end, newest.root, newest

    def commit_on_device(
        self, tree: DraftTree, nodes: Int[Tensor, "batch depth"], next_token: Int[Tensor, " batch"]
    ) -> None:
        """Make each root and all accepted nodes permanent, without waiting for the device.

        The session processes the new tokens at once. Afterwards, the lengths on the host are too
        large for sequences in which not all levels were accepted.
        """
        self._move(self.base_length, nodes)
        ends = [length + 1 + nodes.shape[1] for length in self.lengths]
        newest = self._accepted(tree, nodes, ends, next_token)._replace(is_padded=True)
        if self.session is not None:
            self._advance(newest)
        self.follow(ends, newest.end, newest.root)

    def follow(
        self,
        lengths: Sequence[int],
        base_length: Int[Tensor, " batch"],
        roots: Int[Tensor, "batch 1"],
    ) -> None:
        self.lengths = lengths
        self._base, self._roots = base_length, roots

    def rollback(self, length: int) -> None:
        if self.cache.states is not None:
            length = self.cache.states.rollback(length)
        self.lengths = [min(length, former) for former in self.lengths]
        if self.session is not None:
            self.session.rollback(length)

    @property
    def works_on_device(self) -> bool:
        """Whether the session, if there is one, never waits for the device."""
        return self.session is None or isinstance(self.session, DeviceSession)

    def restart(self, sampling: Sampling, batch: int) -> None:
        """Discard all tokens, and prepare for other sequences; needs a session on the device."""
        self.show_rows(BatchSampling([sampling] * batch))
        self.lengths = [0] * batch
        if self.session is not None:
            self.session.set_sampling(sampling)

    def show_rows(self, sampling: BatchSampling) -> None:
        """Switch to other sequences, whose lengths must be set afterwards (see `follow`).

        The session, if there is one, must be on the device.
        """
        self.cache.show_rows(len(sampling.each), 2 * self.most_queries)
        if self.session is not None:
            assert isinstance(self.session, DeviceSession)
            self.session.show_rows(sampling)

    def select_sequences(self, indices: Sequence[int]) -> None:
        # A step that is discarded may have written the tokens of another step.
        num_used = [length + 2 * self.most_queries for length in self.lengths]
        self.cache.select_sequences(indices, num_used)
        self.lengths = [self.lengths[index] for index in indices]
        if self.session is not None:
            self.session.select_sequences(indices)

    def append_sequences(self, other: "Context") -> None:
        """Add copies of the sequences of another context of the same target and drafter.

        Both sessions must have processed all cached tokens. Afterwards, the other context may only
        be closed, or appended again after `branch`.
        """
        self.cache.append_sequences(other.cache)
        self.lengths = [*self.lengths, *other.lengths]
        if self.session is not None and other.session is not None:
            self.session.append_sequences(other.session)

    def branch(self, sampling: Sampling) -> None:
        """Prepare to append the sequences once more, with other roots.

        The session processes the last cached token again, or all of them if it is not copied.
        """
        self.lengths = self.lengths  # forgets the roots, which are about to change
        if self.drafter is None or self.session is None:
            return
        if self.session.appends_copies:
            self.session.rollback(min(self.lengths) - 1)
        else:
            count = len(self.lengths)
            self.session = self.drafter.new_session(sampling, self.cache.capacity, count)

    @torch.inference_mode()
    def reserve(self, capacity: int) -> None:
        """Make room for sequences of `capacity` tokens; a cache that grows at least doubles."""
        needed = capacity + self.most_queries
        if needed > self.cache.capacity:
            self.cache.reserve(max(needed, 2 * self.cache.capacity))
            if self.session is not None:
                self.session.reserve(self.cache.capacity)

    def close(self) -> None:
        """Free the cache and the session; further calls have no effect."""
        if not hasattr(self, "cache"):
            return
        if self.session is not None:
            self.session.close()
        del self.cache, self.session

    def _on_device(self, integers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(integers, device=self.target.device)

    def _chain(self, token_ids: Tensor, start: Tensor, highest_start: int) -> StepInput:
        count = token_ids.shape[1]
        slots = start[:, None] + torch.arange(count, device=start.device)
        end, limit = highest_start + count, self.target.spec.max_position
        positions = slots
        if end > min(limit, self.cache.capacity):  # only padding can exceed these limits
            positions = slots.clamp(max=limit - 1)
            slots = slots.clamp(max=self.cache.capacity - 1)
        return StepInput(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            lengths=start,
            highest_slot=min(end, self.cache.capacity) - 1,
            start=highest_start if slots is positions and len(slots) == 1 else None,
        )

    def _accepted(
        self,
        tree: DraftTree,
        nodes: Int[Tensor, "batch depth"],
        ends: Sequence[int],
        next_token: Int[Tensor, " batch"],
    ) -> Committed:
        """Return the roots and the accepted nodes, whose tokens end at `ends`."""
        assert self._roots is not None
        counts = tuple(end - length for length, end in zip(self.lengths, ends, strict=True))
        start = self.base_length
        drafted = tree.token_ids.gather(1, nodes.clamp(min=0))
        return Committed(
            base_length=tuple(ends),
            num_verified=counts,
            token_ids=torch.cat((self._roots, drafted), dim=1),
            root=next_token[:, None],
            start=start,
            end=start + 1 + (nodes != ROOT).sum(dim=1),
            is_padded=min(counts) < 1 + nodes.shape[1],
        )

    def _advance(self, committed: Committed) -> None:
        """Let the session process verified tokens, with the drafter's memory of them."""
        assert self.drafter is not None
        assert self.session is not None
        if "memory" in self.drafter.needs:
            step = self._chain(committed.token_ids, committed.start, max(committed.starts))
            nothing = torch.empty(*step.slots.shape, 0, device=step.slots.device)  # no features
            memory = self.drafter.encode_memory(StepOutput(nothing, step, self.cache))
            committed = committed._replace(memory=memory)
        self.session.advance(committed)

    def _move(self, start: Int[Tensor, " batch"], nodes: Int[Tensor, "batch depth"]) -> None:
        """Move the cached tokens of accepted nodes to the slots that equal their positions."""
        is_accepted = nodes != ROOT
        first = start[:, None]
        final = first + 1 + torch.arange(nodes.shape[1], device=nodes.device)
        # Padding copies the slot of the root onto itself.
        self.cache.move(
            torch.where(is_accepted, first + 1 + nodes, first),
            torch.where(is_accepted, final, first),
        )


def _without_forbidden(tree: DraftTree, grammars: Sequence[GrammarProcessor | None]) -> DraftTree:
    """Return the trees without forbidden deterministic candidates, and with nothing below any.

    A sampled candidate stays, because its siblings were sampled after it; it is never accepted.
    """
    removed = torch.zeros_like(tree.is_valid, device="cpu")
    for index, (grammar, host) in enumerate(zip(grammars, tree.to_host(), strict=True)):
        if grammar is None:
            continue
        sampled = {node for siblings in host.sampled.values() for node in siblings}
        forbidden: set[int] = set()
        for node in sorted(node for siblings in host.children.values() for node in siblings):
            path = [host.token_ids[above] for above in host.path(node)]
            is_below = host.parent[node] in forbidden
            if is_below or not grammar.allows(path):
                forbidden.add(node)
                removed[index, node] = is_below or node not in sampled
    return replace(tree, is_valid=tree.is_valid & ~removed.to(tree.is_valid.device))
