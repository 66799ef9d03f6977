"""Requests to a server that verifies drafts, which are repeated until they are answered."""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import httpx2
import numpy as np
from jaxtyping import UInt8
from pydantic import BaseModel, ValidationError

from inference.client import describe, key_error, seconds_to_wait, server_address
from inference.remote.memory_rows import decode_with_rows
from inference.remote.messages import (
    MemoryRows,
    MessageError,
    OpenSession,
    SessionOpened,
    Verdict,
    VerifierInfo,
    parse_message,
)
from jakiro.errors import ConfigError, JakiroError, PromptError, ResourceError, TargetMismatch
from jakiro.utils.logs import get_logger

AnswerT = TypeVar("AnswerT")
Rows: TypeAlias = UInt8[np.ndarray, "tokens bytes"]

_logger = get_logger(__name__)

_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_CLOSE = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds between two attempts
_FIRST_WAIT, _LONGEST_WAIT = 10.0, 60.0  # seconds that an attempt waits for its answer
_SECONDS_OF_WORK = 600.0  # largest number of seconds in which a server reads a prompt
_BUSY = {408, 425, 429, 502, 503, 504}  # of the server, or of a gateway before it
_REFUSED = {401, 403}
_WRONG = {400, 409}
_GONE = {404, 410}  # status codes of a session that the server does not have
_SESSIONS = "verify/sessions/"


class AnsweredStep(NamedTuple):
    """The verdict of a step, and rows of memory from the tree's root on."""

    verdict: Verdict
    rows: Rows | None = None  # None if the session has no memory


@dataclass
class LinkTraffic:
    """Counts of the requests and bytes that were sent and received for one text."""

    num_calls: int = 0  # number of requests, repeated ones included
    num_repeats: int = 0  # number of requests that were sent again
    num_resumes: int = 0  # number of sessions after the first one
    bytes_up: int = 0  # size of the bodies of requests
    bytes_down: int = 0  # size of the bodies of responses
    has_ended: bool = False  # whether the text has ended, so that no request is sent again


class _Problem(BaseModel):
    message: str
    code: str | None = None


class _Refusal(BaseModel):
    error: _Problem


class Unanswered(ResourceError):
    """A request without an answer that can be used; it can be sent again.

    Attributes:
        seconds: smallest number of seconds until then.
        is_at_work: whether the server may still be reading a prompt.
    """

    seconds = 0.0
    is_at_work = False


class SessionGone(Exception):
    """The server does not have the session of a text any more."""


class ServerLink:
    """The connection to one server; thread-safe."""

    def __init__(self, url: str, key: str | None = None, patience: float = 60.0) -> None:
        self.url = server_address(url)
        self._has_key = key is not None
        self._patience = patience
        self._http = httpx2.Client(
            base_url=f"{self.url}/",
            headers={} if key is None else {"authorization": f"Bearer {key}"},
        )

    def close(self) -> None:
        self._http.close()

    def info(self) -> VerifierInfo:
        """Return the target and the limits of the server; this request is sent once."""
        read = partial(parse_message, kind=VerifierInfo)
        return self._answer("GET", "verify", b"", read, LinkTraffic(), patience=0.0)

    def open(self, request: OpenSession, traffic: LinkTraffic) -> SessionOpened:
        """Open a session.

        While the server reads the prompt, it cannot answer. A repeated request then waits for the
        same reading. Any other request with the same `text_id` ends the earlier session.

        Raises:
            ResourceError: the server cannot be reached or has no room, or its answers cannot be
                read.
        """
        body = request.model_dump_json().encode()
        read = partial(parse_message, kind=SessionOpened)
        opened = self._answer("POST", "verify/sessions", body, read, traffic)
        if traffic.has_ended:  # nobody else would end the session
            self.end(opened.session)
        return opened

    def submit(
        self, session: str, step: int, body: bytes, traffic: LinkTraffic, has_rows: bool = False
    ) -> AnsweredStep:
        """Return the verdict of a step.

        Args:
            has_rows: whether the session has a memory, whose rows come with verdicts.

        Raises:
            SessionGone: the server does not have the session any more.
        """

        def read(content: bytes) -> AnsweredStep:
            if has_rows:
                return AnsweredStep(*decode_with_rows(content, Verdict))
            return AnsweredStep(parse_message(content, Verdict))

        return self._answer("PUT", f"{_SESSIONS}{session}/steps/{step}", body, read, traffic)

    def memory(self, session: str, begin: int, end: int, traffic: LinkTraffic) -> Rows:
        """Return rows of memory; raises `SessionGone` like `submit`."""

        def read(content: bytes) -> Rows:
            header, rows = decode_with_rows(content, MemoryRows)
            if (header.begin, len(rows)) != (begin, end - begin):
                raise MessageError("other_rows", "the server has sent other rows of memory")
            return rows

        path = f"{_SESSIONS}{session}/memory?from={begin}&to={end}"
        return self._answer("GET", path, b"", read, traffic)

    def pause_after_losses(self, count: int) -> None:
        """Wait before another session is opened, unless only one was lost."""
        if count > 1:
            time.sleep(min(_FIRST_PAUSE * 2**count, _LONGEST_PAUSE))

    def end(self, session: str) -> None:
        """Let the server free a session; nothing happens if it cannot be reached."""
        # It ends by itself after some time. The connections may be closed already (RuntimeError).
        with suppress(httpx2.HTTPError, RuntimeError):
            self._http.delete(f"{_SESSIONS}{session}", timeout=_SECONDS_TO_CLOSE)

    def _answer(
        self,
        method: str,
        path: str,
        body: bytes,
        read: Callable[[bytes], AnswerT],
        traffic: LinkTraffic,
        *,
        patience: float | None = None,
    ) -> AnswerT:
        """Send a request until it is answered, and return the content of the answer.

        A connection may be lost without a sign of it, so an answer that is late is asked for again.
        It may also take long, so each attempt waits twice as long as the one before. Patience does
        not end while the server reads a prompt.
        """
        started, pause, seconds = time.monotonic(), _FIRST_PAUSE, _FIRST_WAIT
        while True:
            try:
                return self._attempt(method, path, body, read, traffic, seconds)
            except Unanswered as error:
                failure = error
            allowed = self._patience if patience is None else patience
            allowed = max(allowed, _SECONDS_OF_WORK if failure.is_at_work else 0.0)
            left = allowed - (time.monotonic() - started)
            if left <= 0:
                raise failure
            time.sleep(min(max(failure.seconds, pause * (1 + random.random())), left))
            if traffic.has_ended:
                raise failure
            traffic.num_repeats += 1
            if pause < _LONGEST_PAUSE <= 2 * pause:  # once
                _logger.warning("%s; trying again for %.0f s", failure, left)
            pause, seconds = min(2 * pause, _LONGEST_PAUSE), min(2 * seconds, _LONGEST_WAIT)

    def _attempt(
        self,
        method: str,
        path: str,
        body: bytes,
        read: Callable[[bytes], AnswerT],
        traffic: LinkTraffic,
        seconds: float,
    ) -> AnswerT:
        """Send a request once.

        What the server has not written, such as the page of a proxy while the server is restarted,
        is no answer.
        """
        traffic.num_calls += 1
        traffic.bytes_up += len(body)
        timeout = httpx2.Timeout(seconds, connect=_SECONDS_TO_CONNECT)
        try:
            response = self._http.request(method, path, content=body, timeout=timeout)
        except httpx2.HTTPError as error:
            failure = Unanswered(f"cannot reach the server at {self.url}", got=describe(error))
            failure.is_at_work = method == "POST" and isinstance(error, httpx2.ReadTimeout)
            raise failure from error
        traffic.bytes_down += len(response.content)
        status = response.status_code
        try:
            if response.is_success:
                return read(response.content)
            problem = _Refusal.model_validate_json(response.content).error
        except (MessageError, ValidationError) as error:
            raise Unanswered(
                f"the answers of the server at {self.url} cannot be read",
                got=f"status {status}",
                remedy="try again later, or check the URL and the server's version",
            ) from error
        if status in _BUSY:
            failure = Unanswered(
                f"the server at {self.url} takes no requests at the moment",
                got=f"status {status}: {problem.message}",
            )
            failure.seconds = seconds_to_wait(response.headers.get("retry-after"))
            raise failure
        if path.startswith(_SESSIONS) and status in _GONE:
            raise SessionGone
        raise self._error_of(path, status, problem)

    def _error_of(self, path: str, status: int, problem: _Problem) -> JakiroError:
        if status in _REFUSED:
            return key_error(self.url, status, has_key=self._has_key)
        if path.startswith(_SESSIONS) and status in _WRONG:
            return MessageError(problem.code or "refused", problem.message, status=status)
        if status == httpx2.codes.NOT_FOUND:
            return ConfigError(
                f"the server at {self.url} verifies no drafts of other machines",
                got=f"status {status}",
                remedy="check the URL, or start the server with --remote-sessions 8",
            )
        if problem.code == "other_encoder":
            return TargetMismatch(problem.message)
        if status in _WRONG:
            return PromptError(problem.message)
        return ResourceError(f"the server at {self.url} has failed: {problem.message}")
