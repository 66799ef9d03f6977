"""Recent texts as token ids: bounded, each of one tenant, and forgotten after some time."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

_HELD_OUT = 8  # one in this many texts is never learned from


class Text(NamedTuple):
    """A prompt and its continuation."""

    tenant: str
    token_ids: tuple[int, ...]
    prompt_length: int

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens of the prompt."""
        return self.token_ids[: self.prompt_length]


class Traffic(NamedTuple):
    """The texts of a lesson, from the oldest to the newest."""

    learned: tuple[Text, ...]
    held_out: tuple[Text, ...]

    @property
    def tenants(self) -> tuple[str, ...]:
        """The users whose texts these are, held-out ones included."""
        return tuple(sorted({text.tenant for part in self for text in part}))


@dataclass(frozen=True)
class _Entry:
    text: Text
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
        """The number of tokens of all texts."""
        return self._tokens.total()

    def add(self, tenant: str, token_ids: Sequence[int], prompt_length: int) -> bool:
        """Add a text, and return whether it is new."""
        self.expire()
        if prompt_length >= len(token_ids) or len(token_ids) > self._max_tokens:
            return False
        ids = _bytes(token_ids)
        text = Text(tenant, tuple(token_ids), prompt_length)
        digest = blake2b(_bytes(text.prompt), digest_size=8, key=self._secret).digest()
        key = blake2b(tenant.encode() + b"\0" + ids, digest_size=16).digest()
        is_new = self._remove(key) is None
        is_held_out = int.from_bytes(digest) % _HELD_OUT == 0
        self._entries[key] = _Entry(text, self._clock(), is_held_out)
        self._tokens[tenant] += len(token_ids)
        while self.num_tokens > self._max_tokens:
            self._drop_oldest()
        return is_new

    def expire(self) -> None:
        """Forget the texts that are too old."""
        oldest = self._clock() - self._max_seconds
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.time >= oldest:
                return
            self._remove(key)

    def purge(self, tenant: str) -> int:
        """Forget all texts of a tenant, and return their number."""
        keys = [key for key, entry in self._entries.items() if entry.text.tenant == tenant]
        for key in keys:
            self._remove(key)
        return len(keys)

    def traffic(self, max_learned: int, max_held_out: int) -> Traffic:
        """Return texts for a lesson: half of them the newest, the others spread over the rest.

        Of the held-out texts with the same prompt, only the newest one is returned.
        """
        self.expire()
        entries = self._entries.values()
        learned = [entry.text for entry in entries if not entry.is_held_out]
        held_out: dict[tuple[int, ...], Text] = {}
        for text in (entry.text for entry in entries if entry.is_held_out):
            held_out.pop(text.prompt, None)  # the order is that of the newest texts
            held_out[text.prompt] = text
        return Traffic(
            _chosen(learned, max_learned), _chosen(list(held_out.values()), max_held_out)
        )

    def _drop_oldest(self) -> None:
        """Drop the oldest text of the tenant with the most tokens."""
        ((largest, _),) = self._tokens.most_common(1)
        entries = self._entries.items()
        self._remove(next(key for key, entry in entries if entry.text.tenant == largest))

    def _remove(self, key: bytes) -> _Entry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            tenant, count = entry.text.tenant, len(entry.text.token_ids)
            self._tokens[tenant] -= count
            if not self._tokens[tenant]:
                del self._tokens[tenant]
        return entry


def _bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, np.int64).tobytes()


def _chosen(texts: Sequence[Text], count: int) -> tuple[Text, ...]:
    """Return the newest half of `count` texts, and as many of the others at equal distances."""
    num_newest = count - count // 2
    rest, newest = texts[:-num_newest], texts[-num_newest:]
    number = min(count // 2, len(rest))
    indices: Iterable[int] = (len(rest) * index // number for index in range(number))
    return (*(rest[index] for index in indices), *newest)
