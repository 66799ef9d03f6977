"""What decoding cost and won, defined once."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class DecodeStats:
    """Counts and seconds of one request, or of several pooled.

    Tokens are counted as ids. The first token comes from prefill and counts in no rate. `seconds`
    has the keys prefill, draft, verify, commit and total.
    """

    prefilled: int = 1  # tokens that came with the reading of prompts: one of each request
    emitted: int = 0  # tokens, those included
    target_forwards: int = 0  # after prefill
    accepted: Counter[int] = field(default_factory=Counter)  # depth -> drafts emitted
    reached: Counter[int] = field(
        default_factory=Counter
    )  # depth -> rounds that had candidates there
    proposed_by_proposer: Counter[int] = field(default_factory=Counter)
    accepted_by_proposer: Counter[int] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def count_reached(self, depths: Iterable[int]) -> None:
        """Count nodes, at these depths, that had candidates to try below them."""
        self.reached.update(depth + 1 for depth in depths)

    @property
    def decoded(self) -> int:
        """Tokens after those that came with the reading of prompts."""
        return self.emitted - self.prefilled

    @property
    def tau(self) -> float:
        """Tokens per target forward after prefill; plain decoding gives exactly 1."""
        return self.decoded / self.target_forwards if self.target_forwards else 1.0

    @property
    def conditional_acceptance_rate(self) -> list[float]:
        """Share of rounds that accepted a draft at depth d, of those with a candidate to try."""
        return [self.accepted[depth] / self.reached[depth] for depth in sorted(self.reached)]

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Share of all rounds that accepted a draft at depth d."""
        steps = max(self.target_forwards, 1)
        return [self.accepted[depth] / steps for depth in sorted(self.reached)]

    def acceptance_of(self, proposer: int) -> float | None:
        """Return the share of an expert's candidates that were accepted; None if it had none."""
        proposed = self.proposed_by_proposer[proposer]
        return self.accepted_by_proposer[proposer] / proposed if proposed else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, per second after prefill."""
        decoding = self.seconds["total"] - self.seconds["prefill"]
        return self.decoded / decoding if decoding > 0 else 0.0

    @classmethod
    def pooled(cls, several: Iterable["DecodeStats"]) -> "DecodeStats":
        """Return the sum of several requests' statistics."""
        total = cls(prefilled=0)
        for one in several:
            total.prefilled += one.prefilled
            total.emitted += one.emitted
            total.target_forwards += one.target_forwards
            total.accepted += one.accepted
            total.reached += one.reached
            total.proposed_by_proposer += one.proposed_by_proposer
            total.accepted_by_proposer += one.accepted_by_proposer
            for part, seconds in one.seconds.items():
                total.seconds[part] += seconds
        return total
