"""Sessions in which other machines draft and this server's engine verifies, and their routes.

GET    /v1/verify                           target and limits
POST   /v1/verify/sessions                  open a session, or continue a text in it
PUT    /v1/verify/sessions/ID/steps/N       submit the tree of a step; may be repeated
GET    /v1/verify/sessions/ID/memory        memory of verified tokens, with ?from=0&to=256
DELETE /v1/verify/sessions/ID               end a session
"""

import asyncio
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from inference.generation.prompts import Prompt, continued_tokens
from inference.remote.messages import (
    MessageError,
    OpenSession,
    SessionOpened,
    TreeLimits,
    Verdict,
    VerifierInfo,
    WireMessage,
    parse_message,
)
from inference.remote.tree_frame import decode_step
from inference.serving.answers.answer import unless_disconnected
from inference.serving.api_error import ApiError
from inference.serving.remote.verification_session import (
    DecidedStep,
    VerificationSession,
    gone,
    memory_offer,
    memory_source,
)
from inference.serving.scheduling.decoding_options import DecodingOptions, requests_of
from inference.serving.scheduling.engine_thread import LoadedModel, target_identity
from inference.serving.service import Service, logged_api_error
from jakiro.errors import EngineStopped, JakiroError, ResourceError
from jakiro.target.record import tokenizer_fingerprint
from jakiro.utils.devices import is_out_of_memory
from jakiro.utils.files import fingerprint

T = TypeVar("T")

_JSON = "application/json"
_BYTES = "application/octet-stream"
_NUMBER = re.compile("[0-9]{1,9}")
_NUM_BYTES = 16  # random bytes of an id
_MOST_WAITING = 4  # largest number of requests to one session at the same time
_RETRY_SECONDS = 5


class RemoteSession:
    """A session with a secret id, which belongs to one user.

    Attributes:
        opening: answer to the request that opens the session, or the reading of its prompt.
        verification: None until the prompt is read.
    """

    opening: asyncio.Task[SessionOpened]
    timer: asyncio.TimerHandle | None = None

    def __init__(self, user: str, request: OpenSession) -> None:
        self.id = secrets.token_urlsafe(_NUM_BYTES)
        self.user = user
        self.request = request
        self.verification: VerificationSession | None = None
        self.num_requests = 0

    @property
    def verifying(self) -> VerificationSession:
        assert self.verification is not None, "ids are known once sessions are open"
        return self.verification

    def answers(self, request: OpenSession) -> bool:
        """Return whether a request repeats the one that opens this session.

        It does not if a step was decided since then, or if the session can decide none.
        """
        if self.request != request:
            return False
        if not self.opening.done():
            return True
        if self.opening.exception() is not None or self.verifying.is_closed:
            return False
        return self.verifying.verdicts.next_step == self.opening.result().next_step


class RemoteSessions:
    """The sessions of one server by their ids; not thread-safe.

    Sessions are verified one by one, between the decoding steps of other requests.
    """

    def __init__(self, service: Service) -> None:
        self.limits = TreeLimits()
        self._service = service
        self._sessions: dict[str, RemoteSession] = {}
        self._info: VerifierInfo | None = None
        service.telemetry.watch("remote_sessions", "Open sessions.", lambda: len(self._sessions))

    async def info(self) -> VerifierInfo:
        model = self._service.model
        if self._info is None:
            self._info = await self._service.run_preparation(lambda: _info_of(model, self.limits))
        return self._info

    async def open(self, user: str, request: OpenSession) -> SessionOpened:
        """Read a prompt, or a text to continue, in a session.

        Reading goes on if the device disconnects meanwhile, because it repeats the request. Another
        request for the same text ends its session.
        """
        self._service.check_ready()
        sessions = self._sessions.values()
        text = (user, request.text_id)
        session = next((one for one in sessions if (one.user, one.request.text_id) == text), None)
        if session is not None and not session.answers(request):
            self._end(session)
            session = None
        if session is None:
            session = self._begin(user, request)
        with self._answering(session):
            try:
                return await asyncio.shield(session.opening)
            except asyncio.CancelledError:
                if session.opening.cancelled():  # the session has ended
                    raise gone() from None
                raise

    async def submit(self, user: str, session_id: str, step: int, body: bytes) -> DecidedStep:
        """Return the verdict of a step, which is decided once."""
        outcome = "refused"
        try:
            self._service.check_ready()
            session = self.find(user, session_id)
            with self._answering(session):
                received = decode_step(body)
                decided = await self._on_engine(partial(session.verifying.submit, step, received))
            if decided.verdict is not None:
                self._count(len(received.tree.token_ids), decided.verdict)
            outcome = "replayed" if decided.verdict is None else "decided"
        finally:
            self._service.telemetry.remote_steps.labels(outcome).inc()
        return decided

    async def memory(self, user: str, session_id: str, begin: int, end: int) -> bytes:
        self._service.check_ready()
        session = self.find(user, session_id)
        with self._answering(session):
            return await self._on_engine(partial(session.verifying.memory_rows, begin, end))

    def close(self, user: str, session_id: str) -> None:
        """End a session, and free its memory."""
        self._end(self.find(user, session_id))

    def find(self, user: str, session_id: str) -> RemoteSession:
        """Return a session; the error does not reveal whether another user has one of this id."""
        session = self._sessions.get(session_id)
        if session is None or session.user != user:
            raise gone()
        return session

    @contextmanager
    def _answering(self, session: RemoteSession) -> Iterator[None]:
        """Count a request to a session, whose time without requests begins after the last one."""
        if session.num_requests >= _MOST_WAITING:
            raise _too_many(f"{_MOST_WAITING} requests to a session")
        if session.timer is not None:
            session.timer.cancel()
        session.num_requests += 1
        try:
            with self._service.active():
                yield
        finally:
            session.num_requests -= 1
            if not session.num_requests and session.id in self._sessions:
                seconds = self._service.settings.remote_idle_seconds
                loop = asyncio.get_running_loop()
                session.timer = loop.call_later(seconds, self._end, session)

    def _begin(self, user: str, request: OpenSession) -> RemoteSession:
        """Return a session whose prompt is about to be read."""
        sessions, settings = self._sessions, self._service.settings
        most_of_user = settings.remote_sessions_per_key
        if sum(session.user == user for session in sessions.values()) >= most_of_user:
            raise _too_many(f"{most_of_user} sessions of this key")
        if len(sessions) >= settings.remote_sessions:
            raise _too_many(f"{settings.remote_sessions} sessions of all keys")
        session = RemoteSession(user, request)
        sessions[session.id] = session
        session.opening = asyncio.ensure_future(self._read_prompt(session))
        session.opening.add_done_callback(partial(self._end_unless_opened, session))
        return session

    async def _read_prompt(self, session: RemoteSession) -> SessionOpened:
        """Return the answer to the request that opens a session, after its prompt was read."""
        service, message = self._service, session.request
        model = service.model
        decoder = model.engine.decoder
        prompt, options = _prompt_of(message), _options_of(message)
        is_answer = message.resume is not None and message.resume.is_answer
        info = await self.info()
        memory = memory_source(decoder.drafter, info.memory, message.memory)
        arguments = decoder, model.engine.capacity, prompt, options
        try:
            (request,), _ = await service.run_preparation(
                lambda: requests_of(*arguments, is_answer=is_answer)
            )
        except JakiroError as error:
            raise logged_api_error(error) from error
        service.telemetry.tokens.labels("prompt").inc(len(request.token_ids))
        make = partial(
            VerificationSession,
            decoder.target,
            request,
            model.tokenizer,
            self.limits,
            message.resume,
            memory,
            stops=options.stops,
            before=() if is_answer else continued_tokens(prompt, request.token_ids),
            threads=decoder.threads,
        )
        verification = session.verification = await self._on_engine(make)
        while not verification.is_open:
            await self._on_engine(verification.read_chunk)
        return SessionOpened(
            session=session.id,
            fingerprint=info.fingerprint,
            samples=request.sampling.do_sample,
            prompt_token_ids=request.token_ids,
            emitted=verification.emitted,
            text=verification.text,
            finished=verification.is_finished,
            next_step=verification.verdicts.next_step,
            limits=self.limits,
            end_ids=sorted(request.stop.eos_ids),
        )

    def _count(self, num_drafted: int, verdict: Verdict) -> None:
        telemetry = self._service.telemetry
        telemetry.steps.inc()
        telemetry.tokens.labels("generated").inc(len(verdict.emitted))
        telemetry.tokens.labels("drafted").inc(num_drafted)
        telemetry.tokens.labels("accepted").inc(verdict.num_accepted)

    async def _on_engine(self, function: Callable[[], T]) -> T:
        try:
            return await asyncio.wrap_future(self._service.model.engine.call(function))
        except MessageError:
            raise
        except JakiroError as error:
            raise logged_api_error(error) from error
        except (RuntimeError, MemoryError) as error:
            raise logged_api_error(_error_of(error)) from error

    def _end_unless_opened(
        self, session: RemoteSession, opening: asyncio.Task[SessionOpened]
    ) -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._end(session)

    def _end(self, session: RemoteSession) -> None:
        """Forget a session, and free its memory after its current step."""
        if self._sessions.pop(session.id, None) is None:
            return
        if session.timer is not None:
            session.timer.cancel()
        session.opening.cancel()  # without effect if the prompt is read
        if session.verification is not None:
            with suppress(EngineStopped):
                self._service.model.engine.call(session.verification.close)


def _info_of(model: LoadedModel, limits: TreeLimits) -> VerifierInfo:
    spec = model.engine.decoder.target.spec
    return VerifierInfo(
        model=model.name,
        # of everything that the text for a seed and drafts depends on
        fingerprint=f"fp_{fingerprint(*target_identity(model.engine))[:12]}",
        target=spec.fingerprint,
        tokenizer=tokenizer_fingerprint(model.tokenizer),
        has_template=model.tokenizer.chat_template is not None,
        vocab_size=spec.vocab_size,
        capacity=model.engine.capacity,
        limits=limits,
        memory=memory_offer(model.engine.decoder.drafter),
    )


def _prompt_of(request: OpenSession) -> Prompt:
    prompt: Any = request.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return prompt
    return [message.model_dump() for message in prompt]


def _options_of(request: OpenSession) -> DecodingOptions:
    return DecodingOptions(
        seed=request.seed,
        max_new_tokens=request.max_tokens,
        temperature=request.temperature,
        stops=request.stop,
        others=request.model_dump(include={"top_p", "top_k", "min_p"}, exclude_none=True),
    )


def _error_of(error: Exception) -> JakiroError:
    if not is_out_of_memory(error):
        return JakiroError(f"verification has failed: {type(error).__name__}: {error}")
    return ResourceError(
        "there is no memory for the text",
        remedy="shorten the prompt, lower max_tokens, or try again later",
    )


def _too_many(most: str) -> ApiError:
    return ApiError(
        429,
        f"too many sessions or requests at once; expected: at most {most}; got: one more; "
        "remedy: close a session, or try again later",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after=_RETRY_SECONDS,
    )


def add_remote_routes(app: Starlette, service: Service) -> None:
    """Let other machines draft for the target of a server."""
    app.state.remote = RemoteSessions(service)
    session = "/v1/verify/sessions/{session}"
    app.router.routes += [
        Route("/v1/verify", _info, methods=["GET"]),
        Route("/v1/verify/sessions", _open, methods=["POST"]),
        Route(session, _close, methods=["DELETE"]),
        Route(f"{session}/memory", _memory, methods=["GET"]),
        Route(f"{session}/steps/{{step}}", _submit, methods=["PUT"]),
    ]


async def _info(request: HttpRequest) -> Response:
    return _message(await _sessions(request).info())


async def _open(request: HttpRequest) -> Response:
    message = parse_message(await request.body(), OpenSession)
    work = _sessions(request).open(request.state.user, message)
    return _message(await unless_disconnected(request.receive, work), 201)


async def _submit(request: HttpRequest) -> Response:
    sessions, session = _sessions(request), _session(request)
    sessions.find(*session)  # before the body is read
    step = _number(request.path_params["step"], "the number of the step")
    decided = await sessions.submit(*session, step, await request.body())
    return Response(decided.body, media_type=_BYTES if decided.has_rows else _JSON)


async def _memory(request: HttpRequest) -> Response:
    begin, end = (_number(request.query_params.get(name, ""), name) for name in ("from", "to"))
    rows = await _sessions(request).memory(*_session(request), begin, end)
    return Response(rows, media_type=_BYTES)


async def _close(request: HttpRequest) -> Response:
    _sessions(request).close(*_session(request))
    return Response(status_code=204)


def _sessions(request: HttpRequest) -> RemoteSessions:
    sessions: RemoteSessions = request.app.state.remote
    return sessions


def _session(request: HttpRequest) -> tuple[str, str]:
    return request.state.user, request.path_params["session"]


def _number(text: str, name: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise MessageError("malformed_message", f"{name} is no number", got=repr(text[:20]))
    return int(text)


def _message(message: WireMessage, status: int = 200) -> Response:
    return Response(message.model_dump_json(), status, media_type=_JSON)
