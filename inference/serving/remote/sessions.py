"""Sessions in which other machines draft and this server's engine verifies."""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from inference.drafters.trained.memory import memory_drafter
from inference.generation.prompts import Prompt, continued_tokens
from inference.remote.messages import (
    MessageError,
    OpenSession,
    SessionOpened,
    TreeLimits,
    Verdict,
    VerifierInfo,
)
from inference.remote.tree_frame import decode_step
from inference.serving.api_error import ApiError
from inference.serving.remote.memory_source import memory_offer, memory_source
from inference.serving.remote.verification_session import DecidedStep, VerificationSession, gone
from inference.serving.scheduling.decoding_options import DecodingOptions
from inference.serving.scheduling.loaded_model import LoadedModel, target_identity
from inference.serving.service import Service, logged_api_error
from jakiro.errors import EngineStopped, JakiroError, ResourceError
from jakiro.target.record import tokenizer_fingerprint
from jakiro.utils.devices import is_out_of_memory
from jakiro.utils.files import fingerprint

T = TypeVar("T")

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
        return self.verifying.book.next_step == self.opening.result().next_step

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request while the block answers it."""
        if self.num_requests >= _MOST_WAITING:
            raise _too_many(f"{_MOST_WAITING} requests to a session")
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1


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
        """Return the target and the limits."""
        model = self._service.model
        if self._info is None:
            self._info = await self._service.prepared(lambda: _info_of(model, self.limits))
        return self._info

    async def open(self, user: str, request: OpenSession) -> SessionOpened:
        """Read a prompt, or a text to continue, in a session.

        Reading goes on if the device disconnects meanwhile, because it repeats the request. Another
        request for the same text ends its session.
        """
        self._service.check_ready()
        sessions = self._sessions.values()
        text = (user, request.text_id)
        session = next((own for own in sessions if (own.user, own.request.text_id) == text), None)
        if session is not None and not session.answers(request):
            self._end(session)
            session = None
        if session is None:
            session = self._begun(user, request)
        self._touch(session)
        with self._service.active(), session.answering():
            try:
                opened = await asyncio.shield(session.opening)
            except asyncio.CancelledError:
                if session.opening.cancelled():  # the session has ended
                    raise gone() from None
                raise
        self._touch(session)
        return opened

    async def submit(self, user: str, session_id: str, step: int, body: bytes) -> DecidedStep:
        """Return the verdict of a step, which is decided once."""
        outcome = "refused"
        try:
            with self._answering(user, session_id) as session:
                received = decode_step(body)
                decided = await self._on_engine(partial(session.verifying.submit, step, received))
            if decided.verdict is not None:
                self._count(len(received.tree.token_ids), decided.verdict)
            outcome = "replayed" if decided.verdict is None else "decided"
        finally:
            self._service.telemetry.remote_steps.labels(outcome).inc()
        return decided

    async def memory(self, user: str, session_id: str, begin: int, end: int) -> bytes:
        """Return rows of the memory of verified tokens."""
        with self._answering(user, session_id) as session:
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
    def _answering(self, user: str, session_id: str) -> Iterator[RemoteSession]:
        """Find the session of a request, which keeps it alive."""
        self._service.check_ready()
        session = self.find(user, session_id)
        self._touch(session)
        with self._service.active(), session.answering():
            yield session

    def _begun(self, user: str, request: OpenSession) -> RemoteSession:
        """Return a session whose prompt is about to be read."""
        sessions, settings = self._sessions, self._service.settings
        most_of_user = settings.remote_sessions_per_key
        if sum(session.user == user for session in sessions.values()) >= most_of_user:
            raise _too_many(f"{most_of_user} sessions of this key")
        if len(sessions) >= settings.remote_sessions:
            raise _too_many(f"{settings.remote_sessions} sessions of all keys")
        session = RemoteSession(user, request)
        sessions[session.id] = session
        session.opening = asyncio.ensure_future(self._opened(session))
        session.opening.add_done_callback(partial(self._end_unless_opened, session))
        return session

    async def _opened(self, session: RemoteSession) -> SessionOpened:
        """Return the answer to the request that opens a session, after its prompt was read."""
        service, message = self._service, session.request
        model = service.model
        decoder = model.engine.decoder
        prompt, options = _prompt_of(message), _options_of(message)
        is_answer = message.resume is not None and message.resume.is_answer
        info = await self.info()
        memory = memory_source(decoder.drafter, info.memory, message.memory)
        request_of = partial(model.request_of, prompt, options, is_answer=is_answer)
        try:
            request = await service.prepared(request_of)
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
            next_step=verification.book.next_step,
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
        """Return the result of a function that the engine's thread runs."""
        try:
            return await asyncio.wrap_future(self._service.model.engine.call(function))
        except MessageError:
            raise
        except JakiroError as error:
            raise logged_api_error(error) from error
        except (RuntimeError, MemoryError) as error:
            raise logged_api_error(_failed(error)) from error

    def _touch(self, session: RemoteSession) -> None:
        """Let the time without a request begin again."""
        if session.timer is not None:
            session.timer.cancel()
        seconds = self._service.settings.remote_idle_seconds
        session.timer = asyncio.get_running_loop().call_later(seconds, self._expire, session)

    def _expire(self, session: RemoteSession) -> None:
        if session.num_requests:
            self._touch(session)
        else:
            self._end(session)

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


def memory_note(model: LoadedModel, num_sessions: int) -> str:
    """Return what a user should know about the memory of sessions."""
    engine = model.engine
    longest = engine.capacity + 1 + TreeLimits().largest
    drafter = memory_drafter(engine.decoder.drafter)
    hidden_states = () if drafter is None else drafter.hidden_states
    cache = engine.decoder.target.new_cache(1, 1, hidden_states)
    size = cache.bytes_per_token * longest / 1e6
    return (
        f"up to {num_sessions} texts whose drafts other machines send take up to "
        f"{size:.1f} MB each, {num_sessions * size:.1f} MB together"
    )


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
    """Return a prompt as the engine takes it."""
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


def _failed(error: Exception) -> JakiroError:
    """Return the error of a session that cannot continue."""
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
