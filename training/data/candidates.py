"""The kinds of synthesized conversations, and candidates in an order that keeps their shares."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, NamedTuple

from training.data.generation import SynthesisSettings
from training.data.regeneration import random_seed
from training.data.rendering import CUT, Message

GREEDY = "greedy"  # key with which an answer says whether it was decoded greedily


class ConversationKind(NamedTuple):
    """A kind of conversation; all texts are of the kind for which both values are false."""

    is_greedy: bool
    is_multi_turn: bool


@dataclass
class Candidate:
    """A record that is being generated.

    Attributes:
        wanted: the kind that the candidate is to have.
        is_cut: whether the text reached the largest length before its end.
        reason: why the last question, answer or text was dropped.
    """

    number: int
    wanted: ConversationKind
    num_turns: int = 1
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    is_cut: bool = False
    reason: str = "empty"

    def record(self) -> dict[str, Any]:
        """Return the content of the record."""
        if self.messages:
            return {"record": self.number, "messages": self.messages}
        return {"record": self.number, "text": self.text} | ({CUT: True} if self.is_cut else {})

    @property
    def kind(self) -> ConversationKind:
        """The kind that the candidate has: a conversation may have ended before all its turns."""
        return self.wanted._replace(is_multi_turn=len(self.messages) > 2)


class CandidateQueue:
    """The candidates, in an order in which the records have the shares of the settings.

    The kind that a candidate is to have depends only on the seed and its number. The next record is
    always taken from the kind that lags behind its share among the records so far, and candidates
    of one kind are taken in ascending order. Therefore, the records do not depend on which
    candidates are finished first.
    """

    def __init__(self, settings: SynthesisSettings) -> None:
        self._settings = settings
        self.records: Counter[ConversationKind] = Counter()
        # Numbers of candidates that were started but not yet taken, and number of the last one.
        self._open: Counter[ConversationKind] = Counter()
        self._last: Counter[ConversationKind] = Counter()
        self._finished: defaultdict[ConversationKind, deque[Candidate]] = defaultdict(deque)

    def restore(self, record: dict[str, Any]) -> None:
        """Count a record of an earlier run."""
        candidate = self._candidate(int(record["record"]))
        candidate.messages = record.get("messages", [])
        last = self._last[candidate.wanted]
        self._last[candidate.wanted] = max(last, candidate.number)
        self.records[candidate.kind] += 1

    def start(self) -> Iterator[Candidate]:
        """Yield the candidates to be generated, as those of every kind are needed."""
        while True:
            kind = lagging_kind(self._settings, self.records + self._open)
            candidate = self._next_of(kind)
            self._last[kind] = candidate.number
            self._open[kind] += 1
            yield candidate

    def take(self, results: Iterator[Candidate]) -> Candidate:
        """Return the candidate for the next record."""
        kind = lagging_kind(self._settings, self.records)
        while not self._finished[kind]:
            finished = next(results)
            self._finished[finished.wanted].append(finished)
        self._open[kind] -= 1
        return self._finished[kind].popleft()

    def _next_of(self, kind: ConversationKind) -> Candidate:
        candidates = map(self._candidate, count(self._last[kind] + 1))
        return next(candidate for candidate in candidates if candidate.wanted == kind)

    def _candidate(self, number: int) -> Candidate:
        settings, random = self._settings, Random(random_seed(self._settings.seed, number))
        if settings.kind == "texts":
            return Candidate(number, ConversationKind(is_greedy=False, is_multi_turn=False))
        is_greedy = random.random() < settings.greedy
        is_multi_turn = settings.max_turns > 1 and random.random() < settings.multi_turn
        num_turns = random.randint(2, settings.max_turns) if is_multi_turn else 1
        return Candidate(number, ConversationKind(is_greedy, is_multi_turn), num_turns)


def lagging_kind(
    settings: SynthesisSettings, numbers: Counter[ConversationKind]
) -> ConversationKind:
    """Return the kind of which one more record brings the shares closest to the settings.

    Conversations with several questions have the same share among greedy and sampled ones.
    """
    if settings.kind == "texts":
        return ConversationKind(is_greedy=False, is_multi_turn=False)
    num_greedy, _ = greedy_and_multi_turn(numbers)
    is_greedy = _is_lagging(settings.greedy, num_greedy, numbers.total())
    multi_turn = numbers[ConversationKind(is_greedy, is_multi_turn=True)]
    single = numbers[ConversationKind(is_greedy, is_multi_turn=False)]
    share = settings.multi_turn if settings.max_turns > 1 else 0.0
    return ConversationKind(is_greedy, _is_lagging(share, multi_turn, multi_turn + single))


def _is_lagging(share: float, number: int, total: int) -> bool:
    """Return whether one more record should be one of those with this share."""
    return number + 0.5 <= share * (total + 1)


def greedy_and_multi_turn(numbers: Counter[ConversationKind]) -> tuple[int, int]:
    """Return the numbers of greedy conversations, and of those with several questions."""
    num_greedy = sum(number for kind, number in numbers.items() if kind.is_greedy)
    return num_greedy, sum(number for kind, number in numbers.items() if kind.is_multi_turn)
