"""A drafter whose trees go on where they repeat themselves, over any drafter that chooses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.draft_tree import ROOT, DraftTree, TreeRow
from inference.drafters.candidates import Candidates, chosen_tree
from inference.drafters.combined_session import CombinedSession
from inference.drafters.repeats import Repeated, RepeatSettings, with_repeats
from inference.drafters.small_lm import SmallLMSession
from inference.drafters.trained import TrainedSession
from inference.protocol import Budget, Committed, Drafter, DraftSession, MemoryRows, VerifyResult
from inference.sampling import Sampling
from jakiro.errors import ConfigError
from jakiro.target import StepOutput


class RepeatingDrafter:
    """Drafts as another drafter does, and repeats what its trees say twice.

    Args:
        drafter: whose trees are chosen, not drawn.
        settings: of the repeats.
    """

    def __init__(self, drafter: Drafter, settings: RepeatSettings | None = None) -> None:
        self.drafter = drafter
        self.settings = settings or RepeatSettings()
        self.needs = drafter.needs
        self.hidden_states = drafter.hidden_states
        self.version = drafter.version
        self.turns = drafter.turns
        self.bytes_per_token = drafter.bytes_per_token
        # The other one's trees are never verified as they are.
        self.max_nodes = self.settings.num_nodes
        self.max_depth = self.settings.depth

    def open(self, sampling: Sampling, capacity: int, batch: int = 1) -> "RepeatingSession":
        """Return a session for `batch` sequences of up to `capacity` tokens.

        Raises:
            ConfigError: the drafter draws candidates for this way of sampling.
        """
        session = self.drafter.open(sampling, capacity, batch)
        return RepeatingSession(session, self.settings, self.drafter.max_nodes)

    def reset(self) -> None:
        """Pass on."""
        self.drafter.reset()

    def encode(
        self, output: StepOutput, rows: Int[Tensor, "batch rows"] | None = None
    ) -> MemoryRows:
        """Encode as the other drafter does."""
        return self.drafter.encode(output, rows)


class _Row(NamedTuple):
    """One sequence's tree with repeats, and the one that it was made of."""

    drafted: TreeRow
    repeated: Repeated

    def own(self, path: Sequence[int]) -> list[int]:
        """Return the nodes of a path that are drafted ones, up to the first repeated one."""
        origins: list[int] = []
        at = ROOT
        for node in path:
            origin = self.repeated.origins[node]
            if self.drafted.parent[origin] != at:
                break
            origins.append(origin)
            at = origin
        return origins


class RepeatingSession:
    """A session whose trees are made longer.

    Args:
        session: that drafts.
        settings: of the repeats.
        num_nodes: most candidates that are drafted.
    """

    def __init__(self, session: DraftSession, settings: RepeatSettings, num_nodes: int) -> None:
        _refuse_drawn(session)
        self.session = session
        self.settings = settings
        self.num_nodes = num_nodes
        self._rows: list[_Row] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the session that drafts."""
        return self.session.lengths

    def advance(self, committed: Committed) -> None:
        """Pass on."""
        self.session.advance(committed)

    def propose(self, budget: Budget, generators: Sequence[torch.Generator]) -> DraftTree:
        """Return trees below the roots, within the budget, repeats included."""
        asked = self.num_nodes if budget.num_nodes > 0 else 0
        tree = self.session.propose(Budget(asked, budget.depth), generators)
        drafted = tree.rows(tree.token_ids[:, :0])[0]
        scores = tree.score.exp().double().tolist()
        depth = self.settings.depth if budget.depth is None else budget.depth
        pairs = zip(drafted, scores, strict=True)
        self._rows = [
            _Row(row, self._repeated(row, own, budget.num_nodes, depth)) for row, own in pairs
        ]
        candidates = [row.repeated.candidates for row in self._rows]
        proposers = [
            [row.drafted.proposer_id[node] for node in row.repeated.origins] for row in self._rows
        ]
        return chosen_tree(candidates, tree.base_length, tree.round_id, proposers)

    def feedback(self, result: VerifyResult) -> None:
        """Pass on what is known of the tree that was drafted."""
        if result.base_length == list(self.lengths) and self._rows:
            self.session.feedback(self._translated(result))

    def conclude(self, place: int, token_ids: Sequence[int]) -> None:
        """Pass on."""
        self.session.conclude(place, token_ids)

    def rollback(self, length: int) -> None:
        """Pass on."""
        self.session.rollback(length)
        self._rows = []

    def keep(self, places: Sequence[int]) -> None:
        """Pass on."""
        self.session.keep(places)
        self._rows = []

    def adopt(self, sampling: Sampling) -> None:
        """Pass on; errors as for `RepeatingDrafter.open`."""
        self.session.adopt(sampling)
        _refuse_drawn(self.session)

    def reserve(self, capacity: int) -> None:
        """Pass on."""
        self.session.reserve(capacity)

    def close(self) -> None:
        """Pass on."""
        self.session.close()

    def _repeated(
        self, row: TreeRow, scores: Sequence[float], num_nodes: int, depth: int
    ) -> Repeated:
        """Return a sequence's tree with repeats, its invalid candidates left out."""
        nodes = sorted(node for siblings in row.children.values() for node in siblings)
        place = {ROOT: ROOT, **{node: index for index, node in enumerate(nodes)}}
        tree = Candidates(
            np.array([row.token_ids[node] for node in nodes], np.int64),
            np.array([place[row.parent[node]] for node in nodes], np.int64),
            np.array([row.depth[node] for node in nodes], np.int64),
            np.array([scores[node] for node in nodes]).clip(min=1e-30),
        )
        found = with_repeats(tree, self.settings, num_nodes, depth)
        return Repeated(found.candidates, [nodes[origin] for origin in found.origins])

    def _translated(self, result: VerifyResult) -> VerifyResult:
        """Return a result in terms of the drafted trees: a path ends where repeats begin."""
        pairs = list(zip(self._rows, result.path, strict=True))
        paths = [row.own(path) for row, path in pairs]
        next_token = [
            int(row.repeated.candidates.token_ids[path[len(own)]]) if len(own) < len(path) else last
            for (row, path), own, last in zip(pairs, paths, result.next_token, strict=True)
        ]

        def verified(place: int, node: int) -> int:
            return node if node == ROOT else result.path[place][paths[place].index(node)]

        def laws(place: int, node: int) -> Float[Tensor, " vocab"]:
            return result.laws(place, verified(place, node))

        def logits(place: int, nodes: Sequence[int]) -> Float[Tensor, "nodes vocab"]:
            return result.logits(place, [verified(place, node) for node in nodes])

        return replace(
            result,
            path=paths,
            accepted_length=[len(own) for own in paths],
            next_token=next_token,
            laws=laws,
            logits=logits,
        )


def _refuse_drawn(session: DraftSession) -> None:
    shaped = TrainedSession | SmallLMSession | CombinedSession
    if isinstance(session, shaped) and session.shape.sampled:
        raise ConfigError(
            "repeats cannot be added to trees whose candidates are drawn",
            expected="a drafter that chooses its candidates at every temperature",
            got="trees with sampled=True",
            remedy="give the drafter a tree with sampled=False, or a small model drawn=False",
        )
