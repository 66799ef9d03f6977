"""The thread that owns the models, to which other threads submit prompts, and their identity."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import transformers
from transformers import LogitsProcessorList

from inference.engine.lane import Lane
from inference.engine.policy import DraftPolicy
from inference.generation.prompts import Prompt, needed
from inference.protocol import request_counter_of
from inference.sampling.options import Sampling
from inference.serving.api_error import ApiError
from inference.serving.decoding_options import DecodingOptions, requests_of
from inference.serving.details import DetailWriter
from inference.serving.scheduler import Event, Job, Scheduler
from jakiro import __version__
from jakiro.errors import EngineStopped
from jakiro.utils.files import fingerprint
from jakiro.utils.logs import get_logger

if TYPE_CHECKING:
    from inference.decoder import SpeculativeDecoder

_logger = get_logger(__name__)

T = TypeVar("T")
Command = Callable[[], None]

_EXACT_BYTES = 4  # size of numbers whose rounding hardly ever changes a text


class EngineThread(AbstractContextManager["EngineThread"]):
    """Decodes prompts that any thread submits at any time, in places that are allocated at start.

    With the same seed and the same trees, a request gets the tokens that it would get alone,
    whatever else is decoded at the same time, unless the drafter learns from requests.

    Args:
        decoder: decoder with the target and the drafter. Only the engine may decode with its
            target at the same time.
        places: largest number of sequences in each lane. There is one lane for all requests, or one
            for greedy decoding and one for sampling if the drafter has different trees for them.
        on_step: function that is called, in the engine's thread, with the seconds of each decoding
            step; it must return at once. None for no function.

    Example:
        with EngineThread(decoder, places=4, capacity=1024) as engine:
            job = engine.submit("def main(", temperature=0, max_new_tokens=32)
            for step in job:
                print(step.token_ids)
    """

    def __init__(
        self,
        decoder: "SpeculativeDecoder",
        places: int = 8,
        capacity: int = 4096,
        on_step: Callable[[float], object] | None = None,
    ) -> None:
        from inference.autotune.policy import numbered  # already known to the decoder

        if decoder.target.is_compiled:
            _logger.warning(
                "compiled=True makes an engine slow at first: decoding steps are compiled again "
                "for every number of sequences that occurs"
            )
        self.decoder = decoder
        self.policy, self._numbered = decoder.policy.reproducible(places), numbered
        longest = min(capacity, decoder.target.spec.max_position)
        lanes = open_lanes(decoder, self.policy, places, longest)
        self.scheduler = Scheduler(lanes, on_step)
        self.error: BaseException | None = None  # why the thread died; None if it did not
        self._lock = Lock()  # held while commands are added, and while the thread stops
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        # Functions to run between steps, and their results; only the engine's thread uses it.
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_stopped = False
        _logger.info(
            "%d places of %d tokens%s take %.1f MB, and a prompt that is read takes up to %.1f MB",
            places,
            longest,
            " for greedy decoding, and as many for sampling," if len(lanes) > 1 else "",
            self.scheduler.num_bytes / 1e6,
            max(lane.prompt_bytes for lane in self.scheduler.lanes) / 1e6,
        )
        self._thread = Thread(target=self._run, name="jakiro-engine", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def seed_obstacle(self) -> str:
        """The reason why a seed may not repeat a text, with the remedy; empty if there is none."""
        target = self.decoder.target
        if request_counter_of(self.decoder.drafter) is not None:
            return "the drafter learns from requests, so a seed does not repeat a sampled text"
        if target.dtype.itemsize < _EXACT_BYTES and not target.modules.is_batch_invariant:
            return (
                "in half precision, a text may depend on what is decoded with it, so a seed may "
                "not repeat it; remedy: --batch-invariant on a CPU, or --dtype float32"
            )
        return ""

    @property
    def is_alive(self) -> bool:
        return not self._is_stopped

    @property
    def capacity(self) -> int:
        """The largest number of tokens of a sequence, including its prompt."""
        return self.scheduler.lanes[0].capacity

    def prepare(
        self,
        prompt: Prompt,
        options: DecodingOptions,
        *,
        first_row: int = 0,
        put: Callable[[Event], object] | None = None,
    ) -> Job:
        """Return a job that continues a prompt, to be passed to `start` once.

        Args:
            first_row: as for `requests_of`.
            put: as for `Job`.

        Raises:
            PromptError: the prompt or an option cannot be used.
            ApiError: the text may become longer than `capacity`.
        """
        decoder = self.decoder
        requests, config = requests_of(decoder, self.capacity, prompt, options, first_row=first_row)
        lane = self.scheduler.lane_of(requests)
        group = self._numbered(requests, config, decoder.drafter, self.policy, is_seeded=False)
        return Job(group.requests, lane, put)

    def start(self, job: Job) -> None:
        """Submit a job; it is decoded as soon as there are places, unless it was cancelled."""
        job.submitted = time.monotonic()
        self._command(lambda: self.scheduler.add(job))

    def submit(self, prompt: Prompt, **options: Any) -> Job:
        """Prepare and start a job that continues a prompt, and return it.

        Args:
            **options: fields of `DecodingOptions`.
        """
        job = self.prepare(prompt, DecodingOptions(**options))
        self.start(job)
        return job

    def cancel(self, job: Job) -> None:
        """End a job before its next decoding step, and free its places."""
        with suppress(EngineStopped):
            self._command(lambda: self.scheduler.cancel(job))

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Let the engine's thread run a function, and return the future of its result.

        The functions run in the order of the calls, one between two decoding steps, so that other
        requests continue.

        Raises:
            EngineStopped: as for `start`; the future raises it if the engine stops before the
                function runs.
        """
        future: Future[T] = Future()
        self._command(lambda: self._calls.append((function, future)))
        return future

    def when_idle(self, change: Callable[[], None]) -> "Future[bool]":
        """Run a function in the engine's thread, unless there are jobs.

        Jobs that are started later see the change, and earlier ones do not.

        Returns:
            Whether the function was run, or its exception.
        """

        def attempt() -> bool:
            is_idle = self.scheduler.is_idle
            if is_idle:
                change()
            return is_idle

        future: Future[bool] = Future()
        self._command(lambda: _run(attempt, future))
        return future

    def close(self) -> None:
        """Stop the engine after the current decoding step.

        Jobs that are not complete end with an `EngineStopped`.
        """
        with self._lock:
            self._commands.put(None)
        self._thread.join()

    def _command(self, command: Command) -> None:
        with self._lock:
            if self._is_stopped:
                raise _stop_error(self.error)
            self._commands.put(command)

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self.error = error
            _logger.exception("the engine has died")
        with self._lock:
            self._is_stopped = True
            while not self._commands.empty():  # jobs that the loop has not seen
                if (command := self._commands.get()) is not None:
                    with suppress(Exception):  # all jobs are about to be ended
                        command()
        self.scheduler.close(_stop_error(self.error))
        for _, future in self._calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(_stop_error(self.error))

    def _loop(self) -> None:
        is_busy = False
        while True:
            while not is_busy or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command()
                is_busy = True
            if self._calls:
                _run(*self._calls.popleft())
            is_busy = self.scheduler.turn() or bool(self._calls)


def _run(function: Callable[[], T], future: "Future[T]") -> None:
    """Run a function, unless its future was cancelled; an exception is a result, too."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - the future raises it
        future.set_exception(error)


def open_lanes(
    decoder: "SpeculativeDecoder", policy: DraftPolicy, places: int, capacity: int
) -> list[Lane]:
    greedy, sampled = (Sampling(LogitsProcessorList(), do_sample) for do_sample in (False, True))
    drafter, threads = decoder.drafter, decoder.threads
    kinds = [greedy]
    if drafter is not None and not drafter.can_share(greedy, sampled):
        kinds.append(sampled)
    shared: dict[str, Any] = {"policy": policy, "threads": threads, "captured": decoder.is_captured}
    return [Lane(decoder.target, drafter, kind, places, capacity, **shared) for kind in kinds]


def _stop_error(error: BaseException | None) -> EngineStopped:
    """Return the error of jobs that are not complete; its cause is why the engine has died."""
    cause = "close() was called" if error is None else f"{type(error).__name__}: {error}"
    stopped = EngineStopped("the engine has stopped", got=cause, remedy="start another engine")
    stopped.__cause__ = error
    return stopped


class LoadedModel:
    def __init__(self, engine: EngineThread, name: str | None = None) -> None:
        decoder = engine.decoder
        model: Any = decoder.target.model
        path = str(model.config.name_or_path).rstrip("/")
        self.engine = engine
        self.tokenizer = needed(decoder.tokenizer)
        self.name = name or path.rpartition("/")[2] or "target"
        self.created = int(time.time())
        names = decoder.drafter.proposer_names if decoder.drafter else ()
        self.details = DetailWriter(self.tokenizer, names)
        self.fingerprint = f"fp_{fingerprint(*_identity(engine))[:12]}"

    def __str__(self) -> str:
        """Return what a user should know when the model is ready."""
        seeds = self.engine.seed_obstacle or "the same seed gives the same text"
        return f"{self.name}: {seeds} ({self.fingerprint})"

    def check_name(self, name: str) -> None:
        if name != self.name:
            raise ApiError(
                404,
                f"the model is not served here; expected: {self.name}",
                param="model",
                code="model_not_found",
            )


def target_identity(engine: EngineThread) -> list[Any]:
    """Return the facts about the target and the libraries that the text for a seed depends on."""
    target = engine.decoder.target
    model: Any = target.model
    return [
        [__version__, torch.__version__, transformers.__version__],
        [target.spec.fingerprint, str(model.dtype), str(model.device.type)],
    ]


def _identity(engine: EngineThread) -> list[Any]:
    """Return everything that the text for a seed depends on, except the settings of requests."""
    from inference.loading import identity_of

    decoder, scheduler = engine.decoder, engine.scheduler
    runs = [engine.policy.new_run(lane.sampling, lane.places) for lane in scheduler.lanes]
    return [
        *target_identity(engine),
        None if decoder.drafter is None else identity_of(decoder.drafter),
        [str(getattr(run, "budget", None)) for run in runs],
    ]
