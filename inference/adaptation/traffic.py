"""What a server keeps of its traffic: texts to learn from, and the tau of recent requests."""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

import numpy as np

from inference.adaptation.lesson import Passage

_HELD_OUT = 8  # one in this many texts is never learned from
LOOKS = (16, 32, 64)  # numbers of requests after the change at which a comparison takes place
# One-sided quantile of the normal distribution: a change without effect is undone with a
# probability of about one percent, over all comparisons.
QUANTILE = 2.6

Finding = Literal["waiting", "good", "worse"]


class Traffic(NamedTuple):
    """The texts of a lesson, from the oldest to the newest.

    Attributes:
        tenants: the users whose texts these are, held-out ones included.
    """

    learned: tuple[Passage, ...]
    held_out: tuple[Passage, ...]
    tenants: tuple[str, ...]


@dataclass(frozen=True)
class _Entry:
    tenant: str
    text: Passage
    time: float
    is_held_out: bool


class TrafficRing:
    """Token ids of recent texts, in memory only; not thread-safe.

    A text that a tenant repeats is kept once. If there are too many tokens, the oldest texts of the
    tenant with the most tokens are dropped, so that no tenant can displace the others.

    Whether a text is held out depends on its prompt alone, so no text with a held-out prompt is
    ever learned from.

    Args:
        secret: key of the choice of held-out prompts. With a secret one, nobody can write prompts
            that are all held out.
    """

    def __init__(
        self,
        max_tokens: int,
        max_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        secret: bytes = b"",
    ) -> None:
        self._max_tokens = max_tokens
        self._max_seconds = max_seconds
        self._clock = clock
        self._secret = secret
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # entries by hash, oldest first
        self._tokens: Counter[str] = Counter()  # number of tokens of each tenant

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_tokens(self) -> int:
        return self._tokens.total()

    def add(self, tenant: str, token_ids: Sequence[int], prompt_length: int) -> bool:
        """Add a text, and return whether it is new."""
        self.expire()
        if prompt_length >= len(token_ids) or len(token_ids) > self._max_tokens:
            return False
        ids = _bytes(token_ids)
        text = Passage(token_ids=tuple(token_ids), prompt_length=prompt_length)
        digest = blake2b(_bytes(text.prompt), digest_size=8, key=self._secret).digest()
        key = blake2b(tenant.encode() + b"\0" + ids, digest_size=16).digest()
        is_new = self._remove(key) is None
        is_held_out = int.from_bytes(digest) % _HELD_OUT == 0
        self._entries[key] = _Entry(tenant, text, self._clock(), is_held_out)
        self._tokens[tenant] += len(token_ids)
        while self.num_tokens > self._max_tokens:
            self._drop_oldest()
        return is_new

    def expire(self) -> None:
        oldest = self._clock() - self._max_seconds
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.time >= oldest:
                return
            self._remove(key)

    def purge(self, tenant: str) -> int:
        """Forget all texts of a tenant, and return their number."""
        keys = [key for key, entry in self._entries.items() if entry.tenant == tenant]
        for key in keys:
            self._remove(key)
        return len(keys)

    def traffic(self, max_learned: int, max_held_out: int) -> Traffic:
        """Return texts for a lesson: half of them the newest, the others spread over the rest.

        Of the held-out texts with the same prompt, only the newest one is returned.
        """
        self.expire()
        learned: list[_Entry] = []
        held_out: dict[tuple[int, ...], _Entry] = {}
        for entry in self._entries.values():
            if not entry.is_held_out:
                learned.append(entry)
                continue
            held_out.pop(entry.text.prompt, None)  # the order is that of the newest texts
            held_out[entry.text.prompt] = entry
        to_learn = _spread(learned, max_learned)
        to_compare = _spread(list(held_out.values()), max_held_out)
        return Traffic(
            learned=tuple(entry.text for entry in to_learn),
            held_out=tuple(entry.text for entry in to_compare),
            tenants=tuple(sorted({entry.tenant for entry in to_learn + to_compare})),
        )

    def _drop_oldest(self) -> None:
        """Drop the oldest text of the tenant with the most tokens."""
        ((largest, _),) = self._tokens.most_common(1)
        entries = self._entries.items()
        self._remove(next(key for key, entry in entries if entry.tenant == largest))

    def _remove(self, key: bytes) -> _Entry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._tokens[entry.tenant] -= len(entry.text.token_ids)
            if not self._tokens[entry.tenant]:
                del self._tokens[entry.tenant]
        return entry


def _bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, np.int64).tobytes()


def _spread(entries: Sequence[_Entry], count: int) -> list[_Entry]:
    """Return the newest half of `count` entries, and as many of the others at equal distances."""
    num_newest = count - count // 2
    rest, newest = entries[:-num_newest], entries[-num_newest:]
    number = min(count // 2, len(rest))
    return [*(rest[len(rest) * index // number] for index in range(number)), *newest]


class _Rate(NamedTuple):
    """Tokens per decoding step, and the variance of its logarithm."""

    value: float
    variance: float


class AcceptanceWatch:
    """Compares the tau of requests before and after a change of the drafter.

    A change of the traffic at the same time may look like a worse drafter. The earlier drafter is
    then used again, which does no harm.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=LOOKS[-1])
        self._before: _Rate | None = None

    @property
    def is_watching(self) -> bool:
        return self._before is not None

    @property
    def is_ready(self) -> bool:
        """Whether there are enough requests to compare later ones with."""
        return len(self._recent) >= LOOKS[0]

    def changed(self, *, watch: bool) -> None:
        """Record that later requests are drafted with other weights."""
        self._before = _rate(list(self._recent)) if watch and self.is_ready else None
        self._recent.clear()

    def add(self, num_tokens: int, num_steps: int) -> Finding:
        """Add a request, and return what is known about the change.

        Args:
            num_steps: number of decoding steps, all of which have drafted.
        """
        if not num_steps:
            return "waiting"
        self._recent.append((num_tokens, num_steps))
        if self._before is None or len(self._recent) not in LOOKS:
            return "waiting"
        after = _rate(list(self._recent))
        change = np.log(after.value / self._before.value)
        if change < -QUANTILE * np.sqrt(after.variance + self._before.variance):
            self._before = None
            return "worse"
        if len(self._recent) < LOOKS[-1]:
            return "waiting"
        self._before = None
        return "good"


def _rate(requests: list[tuple[int, int]]) -> _Rate:
    """Return the ratio of sums, and the variance of its logarithm by the delta method."""
    tokens, steps = np.array(requests, float).T
    ratio = tokens.sum() / steps.sum()
    residual = tokens - ratio * steps
    count = len(requests)
    variance = residual.var(ddof=1) / count / tokens.mean() ** 2
    return _Rate(float(ratio), float(variance))
