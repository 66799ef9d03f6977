"""A small language model's laws for one tree, which it reads level by level."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from inference.protocol import Committed
from inference.trees.builder import Frontier
from jakiro.target.adapter import StepInput, TargetAdapter, WrittenNodes
from jakiro.target.cache import SlotCache


class LMPass:
    """A `LawSource` for one round; rows of the nodes that it reads take the slots behind the root.

    Args:
        model: the small model.
        cache: its rows, those of the roots included.
        vocab_size: number of tokens that target and model have in common.
        features: of the roots.
        lengths: positions of the roots.
    """

    def __init__(
        self,
        model: TargetAdapter,
        cache: SlotCache,
        vocab_size: int,
        features: Float[Tensor, "batch 1 hidden"],
        lengths: Sequence[int],
    ) -> None:
        self.model = model
        self.cache = cache
        self.vocab_size = vocab_size
        self.features = features
        self.lengths = list(lengths)
        self.num_read = torch.tensor(self.lengths, device=model.device) + 1
        self.token_ids = torch.empty(len(self.lengths), 0, dtype=torch.long, device=model.device)
        self.parents = self.positions = self.token_ids  # of the nodes that were read
        self.seen = torch.zeros(len(self.lengths), 1, 0, dtype=torch.bool, device=model.device)
        self._first = 0  # of the nodes of the last frontier

    def joint(
        self, depth: int, frontier: Frontier | None
    ) -> Float[Tensor, "batch f components vocab"]:
        """Return log-probabilities of the candidates at `depth` below each node of the frontier."""
        features = self.features if frontier is None else self._read(depth, frontier)
        logits = self.model.logits(features)[..., : self.vocab_size]
        return logits.float().log_softmax(dim=-1).unsqueeze(2)

    def accepted(self, row: int, token_ids: Sequence[int]) -> list[int]:
        """Return the slots of the nodes that were read along a path from the root.

        Args:
            row: which sequence.
            token_ids: the path; its end may not have been read.
        """
        place_of = {
            (parent, token): place
            for place, (parent, token) in enumerate(
                zip(self.parents[row].tolist(), self.token_ids[row].tolist(), strict=True)
            )
        }
        slots: list[int] = []
        node = -1
        for token in token_ids:
            if (node := place_of.get((node, token), -1)) < 0:
                break
            slots.append(self.lengths[row] + 1 + node)
        return slots

    def select_sequences(self, places: Sequence[int]) -> None:
        """Forget all sequences but those at these places, for which no more laws are asked."""
        self.lengths = [self.lengths[place] for place in places]
        self.token_ids = self.token_ids[list(places)]
        self.parents = self.parents[list(places)]

    def _read(self, depth: int, frontier: Frontier) -> Float[Tensor, "batch f hidden"]:
        before = self.token_ids.shape[1]
        self._take_in(depth, frontier)
        slots = self.num_read[:, None] + torch.arange(
            self.token_ids.shape[1], device=self.num_read.device
        )
        step = StepInput(
            token_ids=frontier.token_ids,
            positions=self.positions[:, before:],
            slots=slots[:, before:],
            lengths=self.num_read,
            highest_slot=max(self.lengths) + self.token_ids.shape[1],
            written=WrittenNodes(slots, self.positions, self.seen),
        )
        return self.model.forward(step, self.cache).features

    def _take_in(self, depth: int, frontier: Frontier) -> None:
        """Note the nodes of a frontier: their parents, and that they see these and themselves."""
        count = frontier.token_ids.shape[1]
        own = torch.eye(count, dtype=torch.bool, device=self.seen.device)
        index = frontier.origin[:, :, None].expand(-1, -1, self.seen.shape[2])
        self.seen = torch.cat(
            (self.seen.gather(1, index), own.expand(len(frontier.origin), -1, -1)), dim=2
        )
        # Nodes of the first level descend from the root, which is no node: -1.
        parents = frontier.origin + self._first if depth > 2 else frontier.origin - 1
        self._first = self.token_ids.shape[1]
        # Padding of drawn trees may stand for any position; it is never seen.
        highest = self.model.spec.max_position - 1
        positions = (self.num_read[:, None] + (depth - 2)).clamp(max=highest)
        self.token_ids = torch.cat((self.token_ids, frontier.token_ids), dim=1)
        self.parents = torch.cat((self.parents, parents), dim=1)
        self.positions = torch.cat((self.positions, positions.expand_as(parents)), dim=1)


WAITING = 64  # verified tokens that are read together with the root; more are read at once


class LMCache:
    """Rows of tokens at the slots equal to their positions; those of a tree stand behind the root.

    A row of a node that was accepted is brought down to its position, any other is overwritten.

    Args:
        model: the small model.
        batch: number of sequences.
        capacity: tokens of the longest sequence, its root included.
        num_nodes: most nodes that are read of a tree.
        vocab_size: number of tokens that target and model have in common.
    """

    def __init__(
        self, model: TargetAdapter, batch: int, capacity: int, num_nodes: int, vocab_size: int
    ) -> None:
        self.model = model
        self.vocab_size = vocab_size
        # Behind the root: nodes that are read, and one slot where padding goes.
        self.scratch = num_nodes + 2
        self.cache: SlotCache = model.new_cache(batch, capacity + self.scratch)
        self.lengths = (0,) * batch
        self._tokens: list[list[int]] = [[] for _ in range(batch)]  # verified ones, then the root
        self._num_read = [0] * batch  # tokens whose rows are in the cache
        self._tree: LMPass | None = None
        self._has_root = False

    def advance(self, committed: Committed) -> None:
        """Take in newly verified tokens and the roots.

        Raises:
            ValueError: tokens are missing between the rows and `committed`.
        """
        if self._has_root and committed.base_length == self.lengths:
            return
        pairs = zip(committed.base_length, committed.num_verified, strict=True)
        starts = tuple(end - count for end, count in pairs)
        if starts != self.lengths:
            raise ValueError(f"session ends at {self.lengths}, the next tokens start at {starts}")
        news = zip(committed.token_ids.tolist(), committed.root.tolist(), strict=True)
        for row, (verified, root) in enumerate(news):
            known = self._tokens[row]
            known[starts[row] :] = [*verified[: committed.num_verified[row]], *root]
        self._keep_accepted(starts)
        self.lengths, self._has_root = committed.base_length, True
        behind = zip(self.lengths, self._num_read, strict=True)
        if max(length - read for length, read in behind) > WAITING:
            self._read(self.lengths)

    def start_tree(self) -> LMPass:
        """Read all that was not read, the roots last; return the source of laws below these."""
        assert self._has_root, "advance before propose"
        # The root is read again if it was: its feature is what counts.
        pairs = zip(self._num_read, self.lengths, strict=True)
        self._num_read = [min(read, length) for read, length in pairs]
        features = self._read([length + 1 for length in self.lengths])
        self._tree = LMPass(self.model, self.cache, self.vocab_size, features, self.lengths)
        return self._tree

    def rollback(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        self.lengths = tuple(min(length, one) for one in self.lengths)
        self._num_read = [min(length, one) for one in self._num_read]
        self._tree, self._has_root = None, False

    def select_sequences(self, places: Sequence[int]) -> None:
        """Forget all sequences but those at these places, which are ascending."""
        self.cache.select_sequences(places)
        self.lengths = tuple(self.lengths[place] for place in places)
        self._tokens = [self._tokens[place] for place in places]
        self._num_read = [self._num_read[place] for place in places]
        if self._tree is not None:
            self._tree.select_sequences(places)

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of up to `capacity` tokens."""
        self.cache.reserve(capacity + self.scratch)

    def _keep_accepted(self, starts: Sequence[int]) -> None:
        """Bring the rows of accepted nodes down to their positions."""
        if self._tree is None:
            return
        sources: list[list[int]] = []
        for row, start in enumerate(starts):
            path = self._tokens[row][start + 1 : -1]  # behind the former root
            sources.append(self._tree.accepted(row, path))
        moves = [(slots, start + 1) for slots, start in zip(sources, starts, strict=True)]
        _move(self.cache, moves, self.model.device)
        self._num_read = [first + len(slots) for slots, first in moves]
        self._tree = None

    def _read(self, ends: Sequence[int]) -> Float[Tensor, "batch 1 hidden"]:
        """Read every sequence up to `ends`; return the features of the last tokens read."""
        ends = [max(pair) for pair in zip(self._num_read, ends, strict=True)]
        spans = list(zip(self._tokens, self._num_read, ends, strict=True))
        width = max(end - start for _, start, end in spans)
        # Padding lands on slots that are written again before they are seen.
        padded = [[*ids[a:b], *[0] * (width - (b - a))] for ids, a, b in spans]
        device = self.model.device
        starts = torch.tensor(self._num_read, device=device)
        slots = starts[:, None] + torch.arange(width, device=device)
        highest = self.model.spec.max_position - 1
        step = StepInput(
            token_ids=torch.tensor(padded, device=device).clamp(max=self.model.spec.vocab_size - 1),
            positions=slots.clamp(max=highest),
            slots=slots.clamp(max=self.cache.capacity - 1),
            lengths=starts,
            highest_slot=min(max(self._num_read) + width, self.cache.capacity) - 1,
        )
        features = self.model.forward(step, self.cache).features
        last = torch.tensor([max(end - start, 1) - 1 for _, start, end in spans], device=device)
        self._num_read = ends
        return features.gather(1, last[:, None, None].expand(-1, 1, features.shape[2]))


def _move(cache: SlotCache, moves: Sequence[tuple[list[int], int]], device: torch.device) -> None:
    """Copy rows to consecutive slots.

    Args:
        cache: that holds them.
        moves: of each sequence, where the rows are and the first slot where they belong.
        device: of the cache.
    """
    width = max(len(slots) for slots, _ in moves)
    if all(slots == list(range(first, first + len(slots))) for slots, first in moves):
        return
    # Padding moves a row onto itself: the one before, which is the root's.
    padded = [[*slots, *[first - 1] * (width - len(slots))] for slots, first in moves]
    final = [
        [*range(first, first + len(slots)), *[first - 1] * (width - len(slots))]
        for slots, first in moves
    ]
    cache.move(torch.tensor(padded, device=device), torch.tensor(final, device=device))
