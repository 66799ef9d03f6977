"""Forward passes, timed in a run or replayed alone; growth of a step's time with the context."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from inference.benchmark.stats import Figure, interval
from inference.benchmark.timing import Work, interleaved, note, now
from inference.engine.loop import DecodeRun
from inference.profiling.subject import ProfilingSubject, random_prompts
from inference.protocol import Drafter
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache_argument import cache_argument

Around = Callable[[str, Callable[[], Any]], Any]


class Stopwatch:
    """Adds up the seconds of all calls with the same name, including the accelerator's work."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        """Make the call, add its seconds, and return its result.

        Args:
            name: name of the call.
            call: call to time.
        """
        started = now()
        result = call()
        self.seconds[name] += now() - started
        return result


class Recorder:
    """Records calls with their arguments, so that they can be replayed."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        """Make the call, record it, and return its result.

        Args:
            name: name of the call.
            call: call to record.
        """
        self.calls.append(call)
        return call()

    @torch.inference_mode()
    def replay(self) -> None:
        """Make all recorded calls again."""
        for call in self.calls:
            call()


@contextmanager
def watched(target: TargetAdapter, drafter: JakiroDrafter | None, around: Around) -> Iterator[None]:
    """Route every forward pass of target and drafter through `around`.

    Of nested calls, only the outermost is routed through `around`.

    Args:
        target: target; its decoder's forward pass and the computation of its logits are watched.
        drafter: drafter; its forward pass, the encoding of its memory and the computation of its
            keys/values are watched; None to watch only the target.
        around: function that receives a name and the call, and returns the result of the call.
    """
    methods = _methods(target, drafter)
    is_inside = False

    def once(name: str, call: Callable[[], Any]) -> Any:
        nonlocal is_inside
        if is_inside:
            return call()
        is_inside = True
        try:
            return around(name, call)
        finally:
            is_inside = False

    for name, owner, method in methods:
        setattr(owner, method, _sent_through(partial(once, name), getattr(owner, method)))
    try:
        yield
    finally:
        for _, owner, method in methods:
            delattr(owner, method)


def _methods(target: TargetAdapter, drafter: JakiroDrafter | None) -> list[tuple[str, object, str]]:
    methods: list[tuple[str, object, str]] = [
        ("target", target.model.get_decoder(), "forward"),
        ("logits", target, "logits"),
    ]
    if drafter is not None:
        methods += [
            ("drafter", drafter, "forward"),
            ("memory", drafter, "encode_memory"),
            ("kv", drafter.trunk, "store_tokens"),
        ]
        own = drafter.trunk.self_attention
        methods += [] if own is None else [("kv", own, "kv")]
    return methods


def _sent_through(around: Callable[[Work], Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def send(*args: Any, **kwargs: Any) -> Any:
        return around(partial(method, *args, **kwargs))

    return send


GOAL = 0.10  # largest acceptable growth
SHORT, LONG = 128, 1536  # numbers of tokens of the contexts
WARM_UP = 2  # number of untimed repetitions

Seconds = dict[str, float]  # name of a timed function -> its seconds in one repetition


def measure_growth(subject: ProfilingSubject) -> dict[str, Figure]:
    """Return how much the time of a step outside forward passes grows with the context length.

    The growth from a short to a long context is given as a share of the time of the whole step with
    the short context.
    """
    new_tokens = (subject.effort.repeats + WARM_UP + 2) * (subject.trained().max_depth + 1) + 1
    short, long = _contexts(subject.target.spec.max_position - new_tokens)
    works: dict[str, Work] = {}
    for name, length in (("short", short), ("long", long)):
        works |= _works(subject, name, length, new_tokens)
    seconds = interleaved(works, subject.effort.repeats, WARM_UP)
    repeats = [
        dict(zip(seconds, taken, strict=True)) for taken in zip(*seconds.values(), strict=True)
    ]
    growth = interval(repeats, _growth)
    milliseconds = {name: 1e3 * median(taken) for name, taken in seconds.items()}
    for name, value in milliseconds.items():
        note(f"context, {name}: {value:.2f} ms")
    details: dict[str, Any] = {"contexts": [short, long], "milliseconds": milliseconds}
    if long < LONG:
        details["note"] = f"the target has too few positions for a context of {LONG}"
    return {"context_growth": Figure(growth, GOAL, details)}


def _contexts(room: int) -> tuple[int, int]:
    long = min(LONG, room)
    return min(SHORT, long // 2), long


def _growth(measured: Sequence[Seconds]) -> float:
    def typical(name: str) -> float:
        return median(repeat[name] for repeat in measured)

    whole = typical("long step") - typical("short step")
    alone = typical("long forwards alone") - typical("short forwards alone")
    return (whole - alone) / typical("short step")


def _works(subject: ProfilingSubject, name: str, length: int, new_tokens: int) -> dict[str, Work]:
    (prompt,) = random_prompts(subject.target, 1, length)

    def steps(drafter: Drafter | None) -> Iterator[object]:
        run = iter(subject.start(drafter, [prompt], new_tokens))
        next(run)  # reads the prompt
        return run

    drafting, autoregressive = steps(subject.trained()), steps(None)
    alone = subject.start(subject.trained(), [prompt], new_tokens)
    return {
        f"{name} step": lambda: next(drafting),
        f"{name} forwards alone": forwards_of_step(subject, alone, skip=2).replay,
        f"{name} autoregressive step": lambda: next(autoregressive),
        f"{name} transformers": _dynamic_step(subject, prompt),
    }


def forwards_of_step(subject: ProfilingSubject, run: DecodeRun, skip: int) -> Recorder:
    """Return the forward passes of a decoding step for replay; the run stops after this step.

    Args:
        subject: target and drafter.
        run: run that has not started yet.
        skip: number of steps before this decoding step, including the prefill.
    """
    steps = iter(run)
    for _ in range(skip):
        next(steps)
    recorder = Recorder()
    with watched(subject.target, subject.drafter, recorder):
        next(steps)
    # The recorded calls write to the run's caches. They would be freed if the iterator were closed,
    # so the recorder keeps a reference to the iterator.
    recorder.calls.append(lambda: steps)
    return recorder


def _dynamic_step(subject: ProfilingSubject, prompt: list[int]) -> Work:
    """Return a function that decodes one token with the model and transformers' default cache."""
    model: Any = subject.model
    cache = DynamicCache(config=subject.target.config)
    ids = torch.tensor([prompt], device=subject.target.device)
    with torch.inference_mode():
        decoder = model.get_decoder()
        decoder(input_ids=ids, **{cache_argument(decoder): cache})
    own = {cache_argument(model): cache}

    @torch.inference_mode()
    def step() -> int:
        token = ids[:, :1]
        logits = model(input_ids=token, use_cache=True, **own).logits
        return int(logits[0, -1].argmax())

    return step
