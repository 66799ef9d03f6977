"""Requests to a server that verifies drafts, which are repeated until they are answered."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import httpx2
import numpy as np
from jaxtyping import UInt8
from pydantic import BaseModel, ConfigDict, ValidationError

from inference.client.client import described, refused_key, seconds_to_wait, server_address
from inference.device.attempts import Attempts
from inference.remote.client_session import Fetch, Send
from inference.remote.errors import MessageError, StepConflict
from inference.remote.memory_rows import decode_with_rows
from inference.remote.messages import (
    MemoryRows,
    OpenSession,
    SessionOpened,
    Verdict,
    VerifierInfo,
    parse_message,
)
from jakiro.errors import (
    ConfigError,
    JakiroError,
    PromptError,
    ResourceError,
    TargetMismatch,
)

AnswerT = TypeVar("AnswerT")
Rows: TypeAlias = UInt8[np.ndarray, "tokens bytes"]

_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_ANSWER = 60.0  # for requests that are sent once
_SECONDS_TO_CLOSE = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds after a session was lost
# Status codes after which a request is sent again. Those of networks that ask to sign in are last.
_REPEATED = {408, 425, 429, 502, 503, 504, 302, 303, 307, 511}
_REFUSED = {401, 403}
_GONE = {404, 410}  # status codes of a session that the server does not have


class AnsweredStep(NamedTuple):
    """The verdict of a step, and rows of memory from the tree's root on."""

    verdict: Verdict
    rows: Rows | None  # None if the session has no memory


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
    """The error in a response of the server."""

    model_config = ConfigDict(extra="ignore")

    message: str
    code: str | None = None
    next_step: int = 0


class _Refusal(BaseModel):
    error: _Problem


class ServerLink:
    """The connection to one server; thread-safe."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        patience: float = 60.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.url = server_address(url)
        self._has_key = key is not None
        self._patience = patience
        self._sleep = sleep
        self._http = httpx2.Client(
            base_url=f"{self.url}/",
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=httpx2.Timeout(_SECONDS_TO_ANSWER, connect=_SECONDS_TO_CONNECT),
        )

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def info(self) -> VerifierInfo:
        """Return the target and the limits of the server; this request is sent once."""
        try:
            response = self._http.get("verify")
        except httpx2.HTTPError as error:
            raise self._unreachable(described(error)) from error
        if response.status_code in _REPEATED:
            raise self._not_taken(response)
        if response.status_code != httpx2.codes.OK:
            raise self._refused(response)
        try:
            return parse_message(response.content, VerifierInfo)
        except MessageError as error:
            raise self._no_interface(str(error)) from error

    def open(self, request: OpenSession, traffic: LinkTraffic) -> SessionOpened:
        """Open a session.

        While the server reads the prompt, it cannot answer. A repeated request then waits for the
        same reading. Any other request with the same `text_id` ends the earlier session.

        Raises:
            ResourceError: the server cannot be reached or has no room, or its answers cannot be
                read.
        """
        body = request.model_dump_json().encode()
        parsed = partial(parse_message, kind=SessionOpened)
        path = "verify/sessions"
        response, opened = self._answer("POST", path, body, parsed, traffic, reads_prompt=True)
        if opened is not None:
            return opened
        if _problem(response).code == "other_encoder":
            raise TargetMismatch(_problem(response).message)
        if response.status_code == httpx2.codes.BAD_REQUEST:
            raise PromptError(_problem(response).message)
        raise self._refused(response)

    def submit(
        self, sent: Send, traffic: LinkTraffic, row_bytes: int | None = None
    ) -> AnsweredStep | None:
        """Return the verdict of a step; None if the server does not have the session any more.

        Args:
            row_bytes: size of a row of memory; None if the session has none.
        """
        path = f"verify/sessions/{sent.session}/steps/{sent.step}"
        parsed = partial(_answered_step, row_bytes=row_bytes)
        response, answered = self._answer("PUT", path, sent.body, parsed, traffic)
        if answered is not None:
            return answered
        if response.status_code in _GONE:
            return None
        problem = _problem(response)
        if response.status_code == httpx2.codes.CONFLICT:
            raise StepConflict(problem.code or "step_conflict", sent.step, problem.next_step)
        if response.status_code == httpx2.codes.BAD_REQUEST:
            raise MessageError(problem.code or "refused", problem.message)
        raise self._refused(response)

    def memory(self, asked: Fetch, traffic: LinkTraffic, row_bytes: int) -> Rows | None:
        """Return rows of memory; None if the server does not have the session any more."""
        path = f"verify/sessions/{asked.session}/memory?from={asked.begin}&to={asked.end}"

        def parsed(body: bytes) -> Rows:
            header, rows = decode_with_rows(body, MemoryRows, row_bytes)
            if (header.begin, len(rows)) == (asked.begin, asked.end - asked.begin):
                return rows
            raise MessageError("other_rows", "the server has sent other rows of memory")

        response, rows = self._answer("GET", path, b"", parsed, traffic)
        if rows is not None:
            return rows
        if response.status_code in _GONE:
            return None
        if response.status_code == httpx2.codes.BAD_REQUEST:
            problem = _problem(response)
            raise MessageError(problem.code or "refused", problem.message)
        raise self._refused(response)

    def pause_after_losses(self, count: int) -> None:
        """Wait before another session is opened, unless only one was lost."""
        if count > 1:
            self._sleep(min(_FIRST_PAUSE * 2**count, _LONGEST_PAUSE))

    def end(self, session: str) -> None:
        """Let the server free a session; nothing happens if it cannot be reached."""
        path = f"verify/sessions/{session}"
        # It ends by itself after some time. The connections may be closed already (RuntimeError).
        with suppress(httpx2.HTTPError, RuntimeError):
            self._http.delete(path, timeout=_SECONDS_TO_CLOSE)

    def _answer(
        self,
        method: str,
        path: str,
        body: bytes,
        parsed: Callable[[bytes], AnswerT],
        traffic: LinkTraffic,
        *,
        reads_prompt: bool = False,
    ) -> tuple[httpx2.Response, AnswerT | None]:
        """Return the first final response, and its content unless the request was refused.

        A small answer or an error that the server has not written is no final response: a page of a
        proxy, for example, may take the place of the server's answer while the server is restarted,
        and the same request can be sent again.
        """
        attempts = Attempts(self._patience)
        while True:
            asked, is_at_work = 0.0, False
            try:
                traffic.num_calls += 1
                traffic.bytes_up += len(body)
                timeout = httpx2.Timeout(attempts.seconds, connect=_SECONDS_TO_CONNECT)
                response = self._http.request(method, path, content=body, timeout=timeout)
                traffic.bytes_down += len(response.content)
                if response.is_success:
                    return response, parsed(response.content)
                if response.status_code not in _REPEATED and _found_problem(response) is not None:
                    return response, None
                failure = self._not_taken(response)
                if "retry-after" in response.headers:
                    asked = seconds_to_wait(response.headers["retry-after"])
            except (httpx2.HTTPError, MessageError) as error:
                failure = self._unanswered(error)
                is_at_work = reads_prompt and isinstance(error, httpx2.ReadTimeout)
            pause = attempts.failed(asked, is_at_work=is_at_work)
            if pause is not None:
                self._sleep(pause)
            if pause is None or traffic.has_ended:
                raise failure
            traffic.num_repeats += 1

    def _refused(self, response: httpx2.Response) -> JakiroError:
        """Return the error for a response that is final."""
        status, problem = response.status_code, _problem(response)
        if status in _REFUSED:
            return refused_key(self.url, status, has_key=self._has_key)
        if status == httpx2.codes.NOT_FOUND:
            return self._no_interface(f"status {status}")
        return ResourceError(f"the server at {self.url} has failed: {problem.message}")

    def _no_interface(self, got: str) -> ConfigError:
        return ConfigError(
            f"the server at {self.url} verifies no drafts of other machines",
            expected="jakiro serve of the same version, with --remote-sessions",
            got=got,
            remedy="check the URL, or start the server with --remote-sessions 8",
        )

    def _not_taken(self, response: httpx2.Response) -> ResourceError:
        """Return the error for a server that cannot process this request at the moment."""
        if response.status_code not in _REPEATED:  # not by the server
            return self._unreadable(f"status {response.status_code}")
        is_limit = response.status_code == httpx2.codes.TOO_MANY_REQUESTS
        problem = _problem(response).message.partition("; expected:")[0]
        return ResourceError(
            f"the server at {self.url} takes no more requests at the moment"
            if is_limit
            else f"the server at {self.url} is not ready",
            expected=f"an answer within {self._patience:g} seconds",
            got=f"status {response.status_code}: {problem}",
            remedy="end other texts with this key, or try again later"
            if is_limit
            else "try again later, or check the log of the server",
        )

    def _unanswered(self, error: httpx2.HTTPError | MessageError) -> ResourceError:
        """Return the error for a server that does not answer, or not with what was asked for."""
        if isinstance(error, httpx2.HTTPError):
            return self._unreachable(described(error))
        return self._unreadable(described(error))

    def _unreadable(self, got: str) -> ResourceError:
        return ResourceError(
            f"the answers of the server at {self.url} cannot be read",
            expected="an answer of jakiro serve of the same version",
            got=got,
            remedy="check that no proxy or sign-in page answers in place of the server",
        )

    def _unreachable(self, got: str) -> ResourceError:
        return ResourceError(
            f"cannot reach the server at {self.url}",
            expected="a server that is ready and can be reached from here",
            got=got,
            remedy="start the server, or check the URL",
        )


def _answered_step(body: bytes, row_bytes: int | None) -> AnsweredStep:
    if row_bytes is None:
        return AnsweredStep(parse_message(body, Verdict), None)
    return AnsweredStep(*decode_with_rows(body, Verdict, row_bytes))


def _found_problem(response: httpx2.Response) -> _Problem | None:
    """Return the error in a response; None if there is none, as in a page of a proxy."""
    try:
        return _Refusal.model_validate_json(response.content).error
    except ValidationError:
        return None


def _problem(response: httpx2.Response) -> _Problem:
    """Return the error in a response, which may come from anywhere."""
    none = _Problem(message=f"status {response.status_code} without a description")
    return _found_problem(response) or none
