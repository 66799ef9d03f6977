"""Limits of the numbers of sequences that run, are prepared, or wait in each lane."""

import math
from collections.abc import Sequence

from inference.serving.api_error import ApiError
from inference.serving.scheduling.job import Job

_LONGEST_RETRY_SECONDS = 60


class Admitted:
    """The sequences of an accepted request."""

    def __init__(self, lane: int, count: int, user: object) -> None:
        self.lane = lane
        self.user = user
        self.jobs: Sequence[Job] | None = None  # None until the prompts are prepared
        self._count = count

    @property
    def num_live(self) -> int:
        """The number of sequences that have not ended yet."""
        if self.jobs is None:
            return self._count
        return sum(len(job.sequences) for job in self.jobs if not job.is_ended)


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
        self._admitted: list[Admitted] = []
        self._mean_seconds = 1.0  # mean duration of a request

    def admit(self, lane: int, count: int, user: object = None) -> Admitted:
        """Return the accepted sequences of a request, to be passed to `release` in the end."""
        if count > self._most_of_user:
            raise ApiError(
                400,
                "the request has too many prompts and choices; "
                f"expected: at most {self._most_of_user}; got: {count}; "
                "remedy: send several requests",
            )
        live = [(own.user, own.num_live) for own in self._admitted if own.lane == lane]
        of_user = sum(num for owner, num in live if owner is user)
        if sum(num for _, num in live) + count > self._most:
            raise self._overload(f"too many requests are waiting; expected: at most {self._queue}")
        if of_user + count > self._most_of_user:
            most = f"at most {self._most_of_user} that run or wait"
            raise self._overload(f"too many sequences of this key; expected: {most}")
        found = Admitted(lane, count, user)
        self._admitted.append(found)
        return found

    def release(self, admitted: Admitted) -> None:
        """Free the room of a request."""
        self._admitted.remove(admitted)

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
