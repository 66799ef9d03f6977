"""Decoding of many dialogues together, in a batch that is refilled continuously.

A dialogue is a generator: it yields a turn, receives the target's output, and returns a result
after its last turn. When a turn is complete, it is replaced in the batch by the next turn of the
same dialogue, or by the first turn of another dialogue.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from inference.decoder import SpeculativeDecoder
from inference.engine.decode_step import DecodeStep
from inference.engine.loop import DecodeRun
from inference.outputs import GenerateOutput, output_of

ADMITTED = 1 / 16  # share of the batch that must be waiting before prompts are read together

T = TypeVar("T")


class Turn(NamedTuple):
    """A prompt that the target continues."""

    prompt: list[int]
    seed: int
    temperature: float
    options: Mapping[str, Any]


Dialogue = Generator[Turn, GenerateOutput, T]


def run_dialogues(
    decoder: SpeculativeDecoder, dialogues: Iterable[Dialogue[T]], batch_size: int
) -> Generator[T, None, None]:
    """Yield the results of all dialogues, in the order of the dialogues.

    A turn gets the same tokens as if it were decoded alone with the same seed, up to rounding,
    unless the drafter learns from requests.
    """
    batch: _Batch[T] = _Batch(decoder, batch_size)
    numbered = enumerate(dialogues)
    number = 0  # number of the next result
    try:
        while True:
            batch.fill(numbered)
            while number in batch.results:
                yield batch.results.pop(number)
                number += 1
            if not batch.is_busy:
                return
            batch.step()
    finally:
        batch.close()


@dataclass
class _Open(Generic[T]):
    """A dialogue that waits for the output of a turn."""

    number: int
    dialogue: Dialogue[T]
    turn: Turn
    steps: list[DecodeStep] = field(default_factory=list)


@dataclass
class _Lane(Generic[T]):
    """A run of the decoder, with the dialogues that wait for it, by request index."""

    run: DecodeRun
    steps: Iterator[list[DecodeStep]]
    waiting: dict[int, _Open[T]] = field(default_factory=dict)


class _Batch(Generic[T]):
    """The open dialogues, decoded in one or several runs.

    With a drafter, all turns of a run have the same options for the selection of tokens.
    """

    def __init__(self, decoder: SpeculativeDecoder, batch_size: int) -> None:
        self.results: dict[int, T] = {}
        self._decoder = decoder
        self._size = batch_size
        self._waiting: list[_Open[T]] = []
        self._lanes: dict[str, _Lane[T]] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._lanes)

    def fill(self, dialogues: Iterator[tuple[int, Dialogue[T]]]) -> None:
        """Start dialogues while there is room for them."""
        is_last = False
        while not is_last and self._num_open < self._size:
            if started := next(dialogues, None):
                self._advance(*started, None)
            is_last = started is None  # no other dialogue is left to wait for
        if is_last or not self._lanes or len(self._waiting) >= ADMITTED * self._size:
            self._admit_waiting()

    def step(self) -> None:
        for key, lane in list(self._lanes.items()):
            for step in next(lane.steps):
                open_ = lane.waiting[step.index]
                open_.steps.append(step)
                if step.finished:
                    state = lane.run.sequences[step.index]
                    output = output_of(state, open_.steps, self._decoder.tokenizer, lane.run)
                    lane.run.forget(step.index)
                    del lane.waiting[step.index]
                    self._advance(open_.number, open_.dialogue, output)
            if not lane.waiting:
                lane.run.close()
                del self._lanes[key]

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.run.close()

    @property
    def _num_open(self) -> int:
        return len(self._waiting) + sum(len(lane.waiting) for lane in self._lanes.values())

    def _advance(self, number: int, dialogue: Dialogue[T], output: Any) -> None:
        """Pass an output, or None at first, to a dialogue, which asks its next turn or ends."""
        try:
            self._waiting.append(_Open(number, dialogue, dialogue.send(output)))
        except StopIteration as end:
            self.results[number] = end.value

    def _admit_waiting(self) -> None:
        """Add the waiting turns to their lanes, together with all that have the same options."""
        groups: dict[str, list[_Open[T]]] = {}
        for open_ in self._waiting:
            options = {"temperature": open_.turn.temperature, **open_.turn.options}
            groups.setdefault(str(sorted(options.items())), []).append(open_)
        self._waiting = []
        for group in groups.values():
            prompts = [open_.turn.prompt for open_ in group]
            options = {"temperature": group[0].turn.temperature, **group[0].turn.options}
            seeds = [open_.turn.seed for open_ in group]
            key = "" if self._decoder.drafter is None else _selection(options)
            indices: Iterable[int] = range(len(group))
            if key in self._lanes:
                run = self._lanes[key].run
                indices = self._decoder.admit(run, prompts, seed=seeds, **options)
            else:
                run = self._decoder.start(prompts, seed=seeds, **options)
                self._lanes[key] = _Lane(run, iter(run))
            self._lanes[key].waiting.update(zip(indices, group, strict=True))


def _selection(options: Mapping[str, Any]) -> str:
    """Return the options that determine how tokens are selected, as text."""
    others = ("max_new_tokens", "stopping_criteria")
    return str(sorted((name, value) for name, value in options.items() if name not in others))
