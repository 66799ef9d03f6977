"""Limits of the numbers of sequences that run, are prepared, or wait in each lane."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from inference.serving.answers.reply import Reply
from inference.serving.api_error import ApiError

_LONGEST_RETRY_SECONDS = 60


class Admission:
    """Accepts requests before they are prepared, as long as there is room; not thread-safe.

    Args:
        has_several_users: whether no user may have more than half of all sequences of a lane, so
            that there is room for the others.
    """

    def __init__(self, places: int, queue: int, *, has_several_users: bool = False) -> None:
        self._places = places
        self._queue = queue
        self._most = places + queue
        self._most_of_user = -(-self._most // 2) if has_several_users else self._most
        self._replies: list[Reply] = []
        self._mean_seconds = 1.0  # mean duration of a request

    @contextmanager
    def admitted(self, reply: Reply) -> Iterator[None]:
        """Keep room for the sequences of a request until they or the block have ended."""
        count = reply.num_live
        if count > self._most_of_user:
            raise ApiError(
                400,
                "the request has too many prompts and choices; "
                f"expected: at most {self._most_of_user}; got: {count}; "
                "remedy: send several requests",
            )
        live = [(own.user, own.num_live) for own in self._replies if own.lane == reply.lane]
        of_user = sum(num for user, num in live if user == reply.user)
        if sum(num for _, num in live) + count > self._most:
            raise self._overload(f"too many requests are waiting; expected: at most {self._queue}")
        if of_user + count > self._most_of_user:
            most = f"at most {self._most_of_user} that run or wait"
            raise self._overload(f"too many sequences of this key; expected: {most}")
        self._replies.append(reply)
        try:
            yield
        finally:
            self._replies.remove(reply)

    def observe(self, seconds: float) -> None:
        """Take the duration of a request into account for the time after which to try again."""
        self._mean_seconds += (seconds - self._mean_seconds) / 8

    def _overload(self, problem: str) -> ApiError:
        waited = self._mean_seconds * (1 + self._queue / self._places)
        return ApiError(
            429,
            f"{problem}; got: more; remedy: try again after the seconds in the header Retry-After",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after=max(1, min(math.ceil(waited), _LONGEST_RETRY_SECONDS)),
        )
