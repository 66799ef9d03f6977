"""How a round of decoding grows with the context, beyond the forwards in it."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from inference.bench.forwards import Recorder, watched
from inference.bench.intervals import Figure, interval
from inference.bench.subject import Subject, random_prompts
from inference.bench.timing import Work, in_turns, note
from inference.engine import DecodeRun
from inference.protocol import Drafter

GOAL = 0.10
SHORT, LONG = 128, 1536
WARM_UP = 2

Turn = dict[str, float]  # seconds of each piece of work in one round of measurement


def measure_growth(subject: Subject) -> dict[str, Figure]:
    """Return the growth of a drafting round from a short to a long context, forwards left out."""
    new_tokens = (subject.effort.repeats + WARM_UP + 2) * (subject.trained().max_depth + 1) + 1
    short, long = _contexts(subject.target.spec.max_position - new_tokens)
    works: dict[str, Work] = {}
    for name, length in (("short", short), ("long", long)):
        works |= _works(subject, name, length, new_tokens)
    seconds = in_turns(works, subject.effort.repeats, WARM_UP)
    turns = [
        dict(zip(seconds, taken, strict=True)) for taken in zip(*seconds.values(), strict=True)
    ]
    growth = interval(turns, _growth)
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


def _growth(turns: Sequence[Turn]) -> float:
    def typical(name: str) -> float:
        return median(turn[name] for turn in turns)

    whole = typical("long round") - typical("short round")
    alone = typical("long forwards alone") - typical("short forwards alone")
    return (whole - alone) / typical("short round")


def _works(subject: Subject, name: str, length: int, new_tokens: int) -> dict[str, Work]:
    (prompt,) = random_prompts(subject.target, 1, length)

    def rounds(drafter: Drafter | None) -> Iterator[object]:
        run = iter(subject.start(drafter, [prompt], new_tokens))
        next(run)  # reads the prompt
        return run

    drafting, plain = rounds(subject.trained()), rounds(None)
    alone = subject.start(subject.trained(), [prompt], new_tokens)
    return {
        f"{name} round": lambda: next(drafting),
        f"{name} forwards alone": forwards_of_round(subject, alone, skip=2).replay,
        f"{name} plain round": lambda: next(plain),
        f"{name} transformers": _dynamic_step(subject, prompt),
    }


def forwards_of_round(subject: Subject, run: DecodeRun, skip: int) -> Recorder:
    """Return the forwards of one round, to be done again alone; the run stays where it is.

    Args:
        subject: whose forwards these are.
        run: has yet to begin.
        skip: what it yields before the round, the prompt's first token included.
    """
    rounds = iter(run)
    for _ in range(skip):
        next(rounds)
    recorder = Recorder()
    with watched(subject.target, subject.drafter, recorder):
        next(rounds)
    # The recorded calls write to the run's caches; closing the iterator would free them.
    recorder.calls.append(lambda: rounds)
    return recorder


def _dynamic_step(subject: Subject, prompt: list[int]) -> Work:
    """Return one token of a plain loop over the model with its default cache."""
    model: Any = subject.model
    cache = DynamicCache(config=subject.target.config)
    ids = torch.tensor([prompt], device=subject.target.device)
    with torch.inference_mode():
        model.get_decoder()(input_ids=ids, past_key_values=cache)

    @torch.inference_mode()
    def step() -> int:
        token = ids[:, :1]
        logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits
        return int(logits[0, -1].argmax())

    return step
