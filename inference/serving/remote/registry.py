"""The sessions of a server by their secret ids, each of which belongs to one user."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from inference.remote.messages import OpenSession, SessionOpened
from inference.serving.api_error import ApiError
from inference.serving.remote.verification_session import VerificationSession

_NUM_BYTES = 16  # random bytes of an id
_NUM_ENDED = 4096  # largest number of ids of ended sessions that are known
_MOST_WAITING = 4  # largest number of requests to one session at the same time
_RETRY_SECONDS = 5


class RegisteredSession:
    """A session, its id and its user.

    Args:
        text_id: id of the text, which the user has chosen.

    Attributes:
        opening: answer to the request that opens the session, or the reading of its prompt; None
            until it begins.
    """

    def __init__(self, user: str, text_id: str) -> None:
        self.id = secrets.token_urlsafe(_NUM_BYTES)
        self.user = user
        self.text_id = text_id
        self.verification: VerificationSession | None = None
        self.opening: asyncio.Task[SessionOpened] | None = None
        self._request: OpenSession | None = None
        self.is_ended = False
        self.num_requests = 0

    def begin(self, request: OpenSession, opening: asyncio.Task[SessionOpened]) -> None:
        """Let a task open the session."""
        self._request, self.opening = request, opening
        # If nobody waits for an exception any more, it is not reported as one that was missed.
        opening.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def is_opening(self) -> bool:
        """Whether the task that opens the session is running."""
        return self.opening is not None and not self.opening.done()

    def answers(self, request: OpenSession) -> bool:
        """Return whether a request repeats the one that opens this session.

        It does not if a step was decided since then, or if the session can decide none.
        """
        opening, verification = self.opening, self.verification
        if opening is None or self._request != request:
            return False
        if not opening.done():
            return True
        if opening.cancelled() or opening.exception() is not None or verification is None:
            return False
        book = verification.book
        return not book.is_gone and book.next_step == opening.result().next_step

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request while the block answers it."""
        if self.num_requests >= _MOST_WAITING:
            raise _too_many(f"{_MOST_WAITING} requests to a session", "one more")
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1


class SessionRegistry:
    """Sessions and their limits, without any input or output; not thread-safe."""

    def __init__(self, most: int, most_of_user: int) -> None:
        self._most = most
        self._most_of_user = most_of_user
        self._sessions: dict[str, RegisteredSession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # users of ended sessions, by id
        self._closing: list[RegisteredSession] = []  # ended sessions that are still being opened

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._sessions)

    def of_text(self, user: str, text_id: str) -> RegisteredSession | None:
        """Return the session of a text; None if there is none."""
        own = (session for session in self._sessions.values() if session.user == user)
        return next((session for session in own if session.text_id == text_id), None)

    def add(self, user: str, text_id: str) -> RegisteredSession:
        """Return a new session.

        An ended session counts as long as it is still being opened.
        """
        self._closing = [session for session in self._closing if session.is_opening]
        sessions = [*self._sessions.values(), *self._closing]
        if sum(session.user == user for session in sessions) >= self._most_of_user:
            raise _too_many(f"{self._most_of_user} sessions of this key", "one more")
        if len(sessions) >= self._most:
            raise _too_many(f"{self._most} sessions of all keys", "one more")
        session = RegisteredSession(user, text_id)
        self._sessions[session.id] = session
        return session

    def find(self, user: str, session_id: str) -> RegisteredSession:
        """Return a session.

        Raises:
            ApiError: the session has ended, or there is none of this id and this user. The error
                does not reveal whether another user has a session of this id.
        """
        found = self._sessions.get(session_id)
        if found is not None and found.user == user:
            return found
        if self._ended.get(session_id) == user:
            raise gone()
        raise ApiError(
            404,
            "there is no such session; expected: the id of a session of this key; got: another id; "
            "remedy: open a session with POST /v1/verify/sessions",
            code="session_not_found",
        )

    def end(self, session: RegisteredSession) -> None:
        """Forget a session; further calls have no effect."""
        session.is_ended = True
        if self._sessions.pop(session.id, None) is None:
            return
        if session.is_opening:
            self._closing.append(session)
        self._ended[session.id] = session.user
        if len(self._ended) > _NUM_ENDED:
            self._ended.popitem(last=False)


def gone() -> ApiError:
    """Return the error for a session that has ended."""
    return ApiError(
        410,
        "the session has ended; expected: a session that is open; got: the id of an earlier one; "
        "remedy: open another session with `resume`",
        code="session_gone",
    )


def _too_many(most: str, got: str) -> ApiError:
    return ApiError(
        429,
        f"too many sessions or requests at once; expected: at most {most}; got: {got}; "
        "remedy: close a session, or try again later",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after=_RETRY_SECONDS,
    )
