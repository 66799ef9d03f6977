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
    numbered = enumerate(dialogues)
    batch: _Batch[T] = _Batch(decoder, batch_size)
    results: dict[int, T] = {}
    number = 0  # number of the next result
    try:
        while True:
            batch.fill(numbered, results)
            while number in results:
                yield results.pop(number)
                number += 1
            if not batch.is_busy:
                return
            batch.step(results)
    finally:
        batch.close()


@dataclass
class _Open(Generic[T]):
    """A dialogue that waits for the output of a turn."""

    number: int
    dialogue: Dialogue[T]
    turn: Turn
    steps: list[DecodeStep] = field(default_factory=list)


class _Lane(Generic[T]):
    """A run of the decoder, with the turns that are decoded in it."""

    def __init__(self, decoder: SpeculativeDecoder, first: list[_Open[T]]) -> None:
        self.decoder = decoder
        self.turns: dict[int, _Open[T]] = {}  # by request index
        group, *others = _alike(first)
        prompts, options = _arguments(group)
        self.run = decoder.start(prompts, **options)
        self.turns.update(enumerate(group))
        self.iterator = iter(self.run)
        for group in others:
            self.admit(group)

    def admit(self, waiting: Iterable[_Open[T]]) -> None:
        """Add turns to the run."""
        for group in _alike(waiting):
            prompts, options = _arguments(group)
            indices = self.decoder.admit(self.run, prompts, **options)
            self.turns.update(zip(indices, group, strict=True))

    def step(self) -> Iterator[tuple[_Open[T], GenerateOutput]]:
        """Run a decoding step, and yield the turns that are complete after it."""
        for step in next(self.iterator):
            turn = self.turns[step.index]
            turn.steps.append(step)
            if step.finished:
                state = self.run.sequences[step.index]
                output = output_of(state, turn.steps, self.decoder.tokenizer, self.run)
                self.run.forget(step.index)
                yield self.turns.pop(step.index), output


class _Batch(Generic[T]):
    """The open dialogues, decoded in one or several runs.

    With a drafter, all turns of a run have the same options for the selection of tokens.
    """

    def __init__(self, decoder: SpeculativeDecoder, batch_size: int) -> None:
        self._decoder = decoder
        self._size = batch_size
        self._waiting: list[_Open[T]] = []
        self._lanes: dict[str, _Lane[T]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a dialogue is open."""
        return bool(self._waiting or self._lanes)

    def fill(self, dialogues: Iterator[tuple[int, Dialogue[T]]], results: dict[int, T]) -> None:
        """Start dialogues while there is room for them."""
        while self._num_open < self._size:
            if (started := next(dialogues, None)) is None:
                self._admit_all()  # no other dialogue is left to wait for
                return
            number, dialogue = started
            try:
                self._waiting.append(_Open(number, dialogue, next(dialogue)))
            except StopIteration as end:
                results[number] = end.value
        if not self._lanes or len(self._waiting) >= ADMITTED * self._size:
            self._admit_all()

    def step(self, results: dict[int, T]) -> None:
        """Run a decoding step in each run, and pass the outputs to the dialogues."""
        for key, lane in list(self._lanes.items()):
            for open_, output in lane.step():
                try:
                    turn = open_.dialogue.send(output)
                    self._waiting.append(_Open(open_.number, open_.dialogue, turn))
                except StopIteration as end:
                    results[open_.number] = end.value
            if not lane.turns:
                lane.run.close()
                del self._lanes[key]

    def close(self) -> None:
        """End all runs, and free their caches."""
        for lane in self._lanes.values():
            lane.run.close()

    @property
    def _num_open(self) -> int:
        return len(self._waiting) + sum(len(lane.turns) for lane in self._lanes.values())

    def _admit_all(self) -> None:
        by_lane: dict[str, list[_Open[T]]] = {}
        for open_ in self._waiting:
            key = "" if self._decoder.drafter is None else _selection(open_.turn)
            by_lane.setdefault(key, []).append(open_)
        self._waiting = []
        for key, group in by_lane.items():
            if key in self._lanes:
                self._lanes[key].admit(group)
            else:
                self._lanes[key] = _Lane(self._decoder, group)


def _alike(turns: Iterable[_Open[T]]) -> Iterable[list[_Open[T]]]:
    """Return the turns in groups with the same options."""
    groups: dict[str, list[_Open[T]]] = {}
    for open_ in turns:
        groups.setdefault(_options(open_.turn), []).append(open_)
    return groups.values()


def _arguments(group: list[_Open[T]]) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the prompts of turns with the same options, and the options."""
    options: dict[str, Any] = {
        "temperature": group[0].turn.temperature,
        "seed": [open_.turn.seed for open_ in group],
        **group[0].turn.options,
    }
    return [open_.turn.prompt for open_ in group], options


def _selection(turn: Turn) -> str:
    """Return the options that determine how tokens are selected, as text."""
    others = ("max_new_tokens", "stopping_criteria")
    options = {name: value for name, value in turn.options.items() if name not in others}
    return f"{turn.temperature} {sorted(options.items())}"


def _options(turn: Turn) -> str:
    """Return the temperature and all other options except the seed, as text."""
    return f"{turn.temperature} {sorted(turn.options.items())}"
