"""Sessions in which other machines draft and this server's engine verifies, and their routes.

GET    /v1/verify                           target and limits
POST   /v1/verify/sessions                  open a session, or continue a text in it
PUT    /v1/verify/sessions/ID/steps/N       submit the tree of a step; may be repeated
GET    /v1/verify/sessions/ID/memory        memory of verified tokens, with ?from=0&to=256
DELETE /v1/verify/sessions/ID               end a session
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from inference.generation.prompts import continued_tokens
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
from inference.serving.answer import unless_disconnected
from inference.serving.api_error import ApiError
from inference.serving.decoding_options import DecodingOptions, requests_of
from inference.serving.engine_thread import LoadedModel, target_identity
from inference.serving.service import Service
from inference.serving.verification_session import (
    DecidedStep,
    VerificationSession,
    gone,
    memory_offer,
    memory_source,
)
from jakiro.errors import EngineStopped, ResourceError
from jakiro.target.record import tokenizer_fingerprint
from jakiro.utils.devices import is_out_of_memory
from jakiro.utils.files import fingerprint

T = TypeVar("T")

_JSON = "application/json"
_BYTES = "application/octet-stream"
_NUM_BYTES = 16  # random bytes of an id
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
        self.num_requests = 0  # number of requests to it that are being answered

    @property
    def verifying(self) -> VerificationSession:
        assert self.verification is not None, "ids are known once sessions are open"
        return self.verification

    @property
    def is_closed(self) -> bool:
        """Whether a failure has closed the session, so that it can decide nothing more."""
        return self.verification is not None and self.verification.is_closed

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


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
            self._info = await self._service.run_preparation(partial(_info_of, model))
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
        # The same request is sent again until it is answered.
        if session is not None and (session.request != request or session.is_closed):
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
        self._end(self.find(user, session_id))

    def find(self, user: str, session_id: str) -> RemoteSession:
        """Return a session; the error does not reveal whether another user has one of this id."""
        session = self._sessions.get(session_id)
        if session is None or session.user != user:
            raise gone()
        return session

    @contextmanager
    def _answering(self, session: RemoteSession) -> Iterator[None]:
        """Let the time without requests to a session begin again after the last of them."""
        session.num_requests += 1
        session.stop_timer()
        try:
            with self._service.active():
                yield
        finally:
            session.num_requests -= 1
            if session.num_requests == 0 and session.id in self._sessions:
                seconds = self._service.settings.remote_idle_seconds
                loop = asyncio.get_running_loop()
                session.timer = loop.call_later(seconds, self._end, session)

    def _begin(self, user: str, request: OpenSession) -> RemoteSession:
        """Return a session whose prompt is about to be read."""
        most = self._service.settings.remote_sessions
        if len(self._sessions) >= most:
            raise ApiError(
                429,
                f"too many sessions; expected: at most {most}; remedy: close one, or try again "
                "later",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=_RETRY_SECONDS,
            )
        session = RemoteSession(user, request)
        self._sessions[session.id] = session
        session.opening = asyncio.ensure_future(self._read_prompt(session))
        session.opening.add_done_callback(partial(self._end_unless_opened, session))
        return session

    async def _read_prompt(self, session: RemoteSession) -> SessionOpened:
        """Return the answer to the request that opens a session, after its prompt was read."""
        service, message = self._service, session.request
        model = service.model
        decoder = model.engine.decoder
        prompt, options = message.model_dump()["prompt"], _options_of(message)
        is_answer = message.resume is not None and message.resume.is_answer
        info = await self.info()
        memory = memory_source(decoder.drafter, info.memory, message.memory)
        arguments = decoder, model.engine.capacity, prompt, options
        (request,), _ = await service.run_preparation(
            lambda: requests_of(*arguments, is_answer=is_answer)
        )
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
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ResourceError("there is no memory for the text; try again later") from error

    def _end_unless_opened(
        self, session: RemoteSession, opening: asyncio.Task[SessionOpened]
    ) -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._end(session)

    def _end(self, session: RemoteSession) -> None:
        """Forget a session, and free its memory after its current step."""
        if self._sessions.pop(session.id, None) is None:
            return
        session.stop_timer()
        session.opening.cancel()  # without effect if the prompt is read
        if session.verification is not None:
            with suppress(EngineStopped):
                self._service.model.engine.call(session.verification.close)


def _info_of(model: LoadedModel) -> VerifierInfo:
    return VerifierInfo(
        model=model.name,
        # of everything that the text for a seed and drafts depends on
        fingerprint=f"fp_{fingerprint(*target_identity(model.engine))[:12]}",
        tokenizer=tokenizer_fingerprint(model.tokenizer),
        has_template=model.tokenizer.chat_template is not None,
        vocab_size=model.engine.decoder.target.spec.vocab_size,
        memory=memory_offer(model.engine.decoder.drafter),
    )


def _options_of(request: OpenSession) -> DecodingOptions:
    return DecodingOptions(
        seed=request.seed,
        max_new_tokens=request.max_tokens,
        temperature=request.temperature,
        stops=request.stop,
        others=request.model_dump(include={"top_p", "top_k", "min_p"}, exclude_none=True),
    )


def add_remote_routes(app: Starlette, service: Service) -> None:
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
    try:
        step = int(request.path_params["step"])
    except ValueError as error:
        raise MessageError("malformed_message", "a step is a number") from error
    body = await request.body()
    decided = await _sessions(request).submit(*_session(request), step, body)
    return Response(decided.body, media_type=_BYTES if decided.has_rows else _JSON)


async def _memory(request: HttpRequest) -> Response:
    query = request.query_params
    try:
        begin, end = int(query["from"]), int(query["to"])
    except (KeyError, ValueError) as error:
        raise MessageError("malformed_message", "from and to are numbers") from error
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


def _message(message: WireMessage, status: int = 200) -> Response:
    return Response(message.model_dump_json(), status, media_type=_JSON)
