"""The forwards that decoding cannot do without, watched inside a run or done again alone."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch

from inference.bench.timing import Work, now
from jakiro.drafter import JakiroDrafter
from jakiro.target import TargetAdapter

Around = Callable[[str, Callable[[], Any]], Any]


class Stopwatch:
    """Adds up the seconds of calls, by name; on an accelerator each call is waited for."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        """Do the call and count its seconds."""
        started = now()
        result = call()
        self.seconds[name] += now() - started
        return result


class Recorder:
    """Keeps calls with their arguments, to be done again."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        """Do the call and keep it."""
        self.calls.append(call)
        return call()

    @torch.inference_mode()
    def replay(self) -> None:
        """Do all calls again."""
        for call in self.calls:
            call()


@contextmanager
def watched(target: TargetAdapter, drafter: JakiroDrafter | None, around: Around) -> Iterator[None]:
    """Send every forward of target and drafter through `around`; calls inside others count once.

    Args:
        target: its model, below the head, and its logits.
        drafter: its forward, its memory, and the rows of its tokens.
        around: is given a name and the call.
    """
    places = _places(target, drafter)
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

    for name, owner, method in places:
        setattr(owner, method, _sent_through(partial(once, name), getattr(owner, method)))
    try:
        yield
    finally:
        for _, owner, method in places:
            delattr(owner, method)


def _places(target: TargetAdapter, drafter: JakiroDrafter | None) -> list[tuple[str, object, str]]:
    places: list[tuple[str, object, str]] = [
        ("target", target.model.get_decoder(), "forward"),
        ("logits", target, "logits"),
    ]
    if drafter is not None:
        places += [
            ("drafter", drafter, "forward"),
            ("memory", drafter, "remember"),
            ("rows", drafter.trunk.self_attention, "rows"),
        ]
    return places


def _sent_through(around: Callable[[Work], Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def send(*args: Any, **kwargs: Any) -> Any:
        return around(partial(method, *args, **kwargs))

    return send
