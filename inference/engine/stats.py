"""Statistics of decoding, such as tau, which is the mean acceptance length."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from inference.draft_tree import ROOT, SequenceTree


@dataclass(repr=False)
class DecodeStats:
    """Counts and times of one request, or of several requests together.

    The first token comes from prefill and is not included in any rate. `seconds` has the keys
    prefill, draft, verify, commit and total.
    """

    from_prefill: int = 1  # number of tokens from prefill: one for each request
    emitted: int = 0  # number of emitted tokens, including those from prefill
    target_forwards: int = 0  # number of decoding steps after prefill
    accepted: Counter[int] = field(default_factory=Counter)  # depth -> number of emitted drafts
    reached: Counter[int] = field(
        default_factory=Counter
    )  # depth -> number of steps that checked candidates at this depth
    proposed_by_proposer: Counter[int] = field(default_factory=Counter)
    accepted_by_proposer: Counter[int] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __repr__(self) -> str:
        return f"DecodeStats({self.summary})"

    def count(self, tree: SequenceTree, path: Sequence[int], num_emitted: int) -> None:
        self.emitted += num_emitted
        visited = enumerate((ROOT, *path)[:num_emitted], start=1)
        self.reached.update(depth for depth, node in visited if node in tree.children)
        self.proposed_by_proposer.update(
            tree.proposer_id[node] for siblings in tree.children.values() for node in siblings
        )
        self.accepted.update(tree.depth[node] for node in path[:num_emitted])
        self.accepted_by_proposer.update(tree.proposer_id[node] for node in path[:num_emitted])

    @property
    def decoded(self) -> int:
        """The number of emitted tokens, excluding those from prefill."""
        return self.emitted - min(self.from_prefill, self.emitted)

    @property
    def tau(self) -> float:
        """The mean acceptance length: tokens per decoding step; 1 without drafts."""
        return self.decoded / self.target_forwards if self.target_forwards else 1.0

    @property
    def drafting_share(self) -> float:
        """The share of decoding steps with drafts."""
        return self.reached[1] / max(self.target_forwards, 1)

    @property
    def speculative_metrics(self) -> dict[str, float | int | list[int]]:
        """What vLLM's field `metrics.speculative_decoding` says of a request.

        Steps without drafts do not count. `acceptance_histogram` is the number of steps with 0, 1,
        2, ... accepted drafts.
        """
        steps, accepted = self.reached[1], self.accepted.total()
        drafted = self.proposed_by_proposer.total()
        deepest = max(self.accepted, default=0)
        at_least = [steps, *(self.accepted[depth] for depth in range(1, deepest + 2))]
        return {
            "mean_acceptance_length": 1 + accepted / max(steps, 1),
            "draft_acceptance_rate": accepted / max(drafted, 1),
            "acceptance_histogram": [more - next_ for more, next_ in pairwise(at_least)],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
        }

    @property
    def conditional_acceptance_rate(self) -> list[float]:
        """For each depth, the acceptance rate of steps with candidates to check at this depth."""
        return [self.accepted[depth] / self.reached[depth] for depth in sorted(self.reached)]

    def acceptance_of(self, proposer: int) -> float | None:
        """Return the accepted share of a proposer's candidates; None if it had no candidates."""
        proposed = self.proposed_by_proposer[proposer]
        return self.accepted_by_proposer[proposer] / proposed if proposed else None

    @property
    def tokens_per_second(self) -> float:
        """The number of tokens per second, excluding prefill."""
        decoding = self.seconds.get("total", 0.0) - self.seconds.get("prefill", 0.0)
        return self.decoded / decoding if decoding > 0 else 0.0

    @property
    def summary(self) -> str:
        """One line for users: tokens, accepted drafts, tau, and speed."""
        tokens = "1 token" if self.emitted == 1 else f"{self.emitted} tokens"
        prefill = f"{self.seconds.get('prefill', 0):.2f} s to read the prompt"
        if not self.target_forwards:
            return f"{tokens} after {prefill}"
        return (
            f"{tokens} ({self.accepted.total()} of them drafted), tau {self.tau:.2f} (tokens per "
            f"decoding step), {self.tokens_per_second:.1f} tokens/s after {prefill}"
        )

    @classmethod
    def pooled(cls, parts: Iterable["DecodeStats"]) -> "DecodeStats":
        total = cls(from_prefill=0)
        for stats in parts:
            # A request that waits, or that failed at once, has no token from prefill.
            total.from_prefill += min(stats.from_prefill, stats.emitted)
            total.emitted += stats.emitted
            total.target_forwards += stats.target_forwards
            total.accepted += stats.accepted
            total.reached += stats.reached
            total.proposed_by_proposer += stats.proposed_by_proposer
            total.accepted_by_proposer += stats.accepted_by_proposer
            for part, seconds in stats.seconds.items():
                total.seconds[part] += seconds
        return total
