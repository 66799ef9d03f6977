"""Sessions in which other machines draft and this server's engine verifies."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from inference.drafters.trained.memory import memory_drafter
from inference.engine.request import Request
from inference.generation.prompts import Prompt, continued_tokens
from inference.remote.errors import MessageError, SessionGone, StepConflict
from inference.remote.messages import (
    OpenSession,
    SessionOpened,
    TreeLimits,
    Verdict,
    VerifierInfo,
)
from inference.remote.step_frame import decode_step
from inference.serving.api_error import ApiError
from inference.serving.remote.memory_source import memory_offer, memory_source
from inference.serving.remote.registry import RegisteredSession, SessionRegistry, gone
from inference.serving.remote.verification_session import VerificationSession
from inference.serving.scheduling.decoding_options import DecodingOptions
from inference.serving.scheduling.engine_thread import EngineThread
from inference.serving.scheduling.loaded_model import LoadedModel, target_identity
from inference.serving.service import Service, logged_api_error
from jakiro.errors import EngineStopped, JakiroError, RequestError, ResourceError
from jakiro.target.record import tokenizer_fingerprint
from jakiro.utils.files import fingerprint
from jakiro.utils.memory import is_out_of_memory

T = TypeVar("T")


class DecidedStep(NamedTuple):
    """The verdict of a submitted step."""

    body: bytes
    is_replay: bool  # whether it was stored already
    has_rows: bool  # whether the body is a frame with rows of memory, instead of JSON


class RemoteSessions:
    """The sessions of one server; not thread-safe.

    Sessions are verified one by one, between the decoding steps of other requests.
    """

    def __init__(self, service: Service) -> None:
        settings = service.settings
        self.limits = TreeLimits()
        self.registry = SessionRegistry(settings.remote_sessions, settings.remote_sessions_per_key)
        self._service = service
        self._info: VerifierInfo | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}  # timers by the id of the session
        service.telemetry.watch("remote_sessions", "Open sessions.", lambda: len(self.registry))

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
        service = self._service
        service.check_ready()
        prompt = _prompt_of(request)
        options = _options_of(request)
        session = self.registry.of_text(user, request.text_id)
        if session is not None and not session.answers(request):
            self._end(session)
            session = None
        if session is None:
            session = self.registry.add(user, request.text_id)
            work = self._opened_or_ended(session, prompt, options, request)
            session.begin(request, asyncio.ensure_future(work))
        self._touch(session)
        assert session.opening is not None, "the session has begun"
        with service.active(), session.answering():
            opened = await asyncio.shield(session.opening)
        self._touch(session)
        return opened

    async def submit(self, user: str, session_id: str, step: int, body: bytes) -> DecidedStep:
        """Return the verdict of a step, which is decided once."""
        outcome = "refused"
        try:
            session = self._found(user, session_id)
            with self._service.active(), session.answering():
                found = await self._decided(session, step, body)
            outcome = "replayed" if found.is_replay else "decided"
        finally:
            self._service.telemetry.remote_steps.labels(outcome).inc()
        return found

    async def memory(self, user: str, session_id: str, begin: int, end: int) -> bytes:
        """Return rows of the memory of verified tokens."""
        session = self._found(user, session_id)
        verification = session.verification
        assert verification is not None, "ids are known once sessions are open"
        with self._service.active(), session.answering():
            return await self._on_engine(partial(verification.memory_rows, begin, end))

    def close(self, user: str, session_id: str) -> None:
        """End a session, and free its memory."""
        self._end(self.registry.find(user, session_id))

    def _found(self, user: str, session_id: str) -> RegisteredSession:
        """Return a session, which a request keeps alive."""
        self._service.check_ready()
        session = self.registry.find(user, session_id)
        self._touch(session)
        return session

    async def _opened_or_ended(
        self,
        session: RegisteredSession,
        prompt: Prompt,
        options: DecodingOptions,
        message: OpenSession,
    ) -> SessionOpened:
        """Return the answer to the request that opens a session, which ends if it has none."""
        try:
            return await self._opened(session, prompt, options, message)
        except BaseException:
            self._end(session)
            raise

    async def _opened(
        self,
        session: RegisteredSession,
        prompt: Prompt,
        options: DecodingOptions,
        message: OpenSession,
    ) -> SessionOpened:
        model = self._service.model
        is_answer = message.resume is not None and message.resume.is_answer
        request_of = partial(model.request_of, prompt, options, is_answer=is_answer)
        try:
            request = await self._service.prepared(request_of)
        except JakiroError as error:
            raise logged_api_error(error) from error
        if session.is_ended:
            raise gone()
        self._service.telemetry.tokens.labels("prompt").inc(len(request.token_ids))
        decoder = model.engine.decoder
        offer = (await self.info()).memory
        try:
            memory = memory_source(decoder.drafter, offer, message.memory)
        except MessageError as error:
            raise _explained(error) from error
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

        def made() -> VerificationSession:
            if session.is_ended:  # while this waited for the engine
                raise gone()
            return make()

        verification = session.verification = await self._on_engine(made)
        while not verification.is_open:
            if session.is_ended:
                raise gone()
            await self._on_engine(verification.read_chunk)
        return self._opening(session, request, verification)

    def _opening(
        self, session: RegisteredSession, request: Request, verification: VerificationSession
    ) -> SessionOpened:
        """Return the answer to the request that has opened a session."""
        return SessionOpened(
            session=session.id,
            fingerprint=_fingerprint(self._service.model.engine),
            samples=request.sampling.do_sample,
            prompt_token_ids=request.token_ids,
            emitted=verification.emitted,
            text=verification.text,
            finished=verification.is_finished,
            next_step=verification.book.next_step,
            limits=self.limits,
            end_ids=sorted(request.stop.eos_ids),
        )

    async def _decided(self, session: RegisteredSession, step: int, body: bytes) -> DecidedStep:
        verification = session.verification
        assert verification is not None, "ids are known once sessions are open"
        try:
            received = decode_step(body)
        except MessageError as error:
            raise _explained(error) from error

        def decide() -> DecidedStep:
            num_replays = verification.book.num_replays
            verdict = verification.submit(step, received)
            is_replay = verification.book.num_replays > num_replays
            return DecidedStep(verdict, is_replay, verification.sends_rows)

        found = await self._on_engine(decide)
        assert verification.verdict is not None, "a step was decided"
        if not found.is_replay:
            self._count(len(received.tree.token_ids), verification.verdict)
        return found

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
        except (MessageError, StepConflict, SessionGone, RequestError) as error:
            raise _explained(error) from error
        except JakiroError as error:
            raise logged_api_error(error) from error
        except (RuntimeError, MemoryError) as error:
            raise logged_api_error(_failed(error)) from error

    def _touch(self, session: RegisteredSession) -> None:
        """Let the time without a request begin again."""
        self._stop_timer(session)
        loop = asyncio.get_running_loop()
        seconds = self._service.settings.remote_idle_seconds
        self._timers[session.id] = loop.call_later(seconds, self._expire, session)

    def _expire(self, session: RegisteredSession) -> None:
        if session.num_requests:
            self._touch(session)
        else:
            self._end(session)

    def _end(self, session: RegisteredSession) -> None:
        """Forget a session, and free its memory after its current step."""
        self._stop_timer(session)
        self.registry.end(session)
        if session.verification is not None:
            with suppress(EngineStopped):
                self._service.model.engine.call(session.verification.close)

    def _stop_timer(self, session: RegisteredSession) -> None:
        if (timer := self._timers.pop(session.id, None)) is not None:
            timer.cancel()


def memory_note(model: LoadedModel, num_sessions: int) -> str:
    """Return what a user should know about the memory of sessions."""
    engine = model.engine
    longest = engine.capacity + 1 + TreeLimits().largest
    own = memory_drafter(engine.decoder.drafter)
    hidden_states = () if own is None else own.hidden_states
    cache = engine.decoder.target.new_cache(1, 1, hidden_states)
    size = cache.bytes_per_token * longest
    return (
        f"up to {num_sessions} texts whose drafts other machines send take up to "
        f"{size / 1e6:.1f} MB each, {num_sessions * size / 1e6:.1f} MB together"
    )


def _info_of(model: LoadedModel, limits: TreeLimits) -> VerifierInfo:
    spec = model.engine.decoder.target.spec
    return VerifierInfo(
        model=model.name,
        fingerprint=_fingerprint(model.engine),
        target=spec.fingerprint,
        tokenizer=tokenizer_fingerprint(model.tokenizer),
        has_template=model.tokenizer.chat_template is not None,
        vocab_size=spec.vocab_size,
        capacity=model.engine.capacity,
        limits=limits,
        memory=memory_offer(model.engine.decoder.drafter),
    )


def _fingerprint(engine: EngineThread) -> str:
    """Return the fingerprint of everything that the text for a seed and drafts depends on."""
    return f"fp_{fingerprint(*target_identity(engine))[:12]}"


def _prompt_of(request: OpenSession) -> Prompt:
    """Return a prompt as the engine takes it."""
    prompt: Any = request.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return prompt
    return [message.model_dump() for message in prompt]


def _options_of(request: OpenSession) -> DecodingOptions:
    others = {"top_p": request.top_p, "top_k": request.top_k, "min_p": request.min_p}
    return DecodingOptions(
        seed=request.seed,
        max_new_tokens=request.max_tokens,
        temperature=request.temperature,
        stops=request.stop,
        others={name: value for name, value in others.items() if value is not None},
    )


def _explained(error: JakiroError) -> ApiError:
    """Return the error for a device whose message cannot be used."""
    if isinstance(error, SessionGone):
        return gone()
    if isinstance(error, StepConflict):
        found = ApiError(409, str(error), code=error.code)
        found.body["error"] |= {"next_step": error.next_step}
        return found
    return ApiError(400, str(error), code=getattr(error, "code", None))


def _failed(error: Exception) -> JakiroError:
    """Return the error of a session that cannot continue."""
    if not is_out_of_memory(error):
        return JakiroError(f"verification has failed: {type(error).__name__}: {error}")
    return ResourceError(
        "there is no memory for the text",
        expected="memory for the prompt and its new tokens",
        got="a failed allocation",
        remedy="shorten the prompt, lower max_tokens, or try again later",
    )
