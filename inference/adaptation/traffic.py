"""What a server keeps of its traffic: texts to learn from."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from inference.adaptation.lesson import Passage

_HELD_OUT = 8  # one in this many texts is never learned from


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
    """

    def __init__(
        self,
        max_tokens: int,
        max_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_seconds = max_seconds
        self._clock = clock
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
        digest = blake2b(_bytes(text.prompt), digest_size=8).digest()
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
