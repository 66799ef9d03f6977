"""Lets the target answer anew, batch by batch, and goes on where it was interrupted."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from inference.decoder import SpeculativeDecoder
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.generation.prompts import needed
from inference.outputs import GenerateOutput
from inference.protocol import Drafter
from jakiro.errors import ConfigError, DataError
from jakiro.target.record import hash_weights, template_fingerprint, tokenizer_fingerprint
from jakiro.utils.settings import Settings
from training.data.regeneration.output_file import OutputFile
from training.data.regeneration.rows import Answer, Dialogue, dialogue_over
from training.data.sources import Intake, Record, RowError, Source


class RegenerationSettings(Settings):
    """How the target answers.

    Attributes:
        temperature: 0 is greedy; other fields of the law are those of the target's own generation
            config.
        max_new_tokens: longest answer.
        prompt_tokens: start of a text that is continued.
        seed: of all draws; those of an answer depend on it, the row and the turn alone.
        batch_size: rows answered together; it decides speed and memory.
        skip_bad_rows: leave out rows that cannot be used; by default the first one ends the run.
    """

    temperature: float = Field(0.0, ge=0)
    max_new_tokens: int = Field(512, ge=1)
    prompt_tokens: int = Field(64, ge=1)
    seed: int = Field(0, ge=0)
    batch_size: int = Field(8, ge=1)
    skip_bad_rows: bool = False


def identify(
    decoder: SpeculativeDecoder, settings: RegenerationSettings, sources: Sequence[Source]
) -> dict[str, Any]:
    """Return what decides the rows; reads all of the target's weights.

    Args:
        decoder: of the target, with its tokenizer.
        settings: how it answers.
        sources: of the data.
    """
    target, tokenizer = decoder.target, needed(decoder.tokenizer)
    facts: dict[str, Any] = {
        # Before the weights, which are others in another one.
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "target_weights": hash_weights(target.model),
        "generation_config": _sampling_of(target.model.generation_config),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": template_fingerprint(tokenizer),
        "data": [source.fingerprint() for source in sources],
        **settings.model_dump(exclude={"batch_size", "seed"}),
    }
    if settings.temperature:  # only then is anything drawn
        facts["seed"] = settings.seed
        facts["drafter"] = _version_of(decoder.drafter)
    return facts


def _version_of(drafter: Drafter | None) -> str | None:
    match drafter:
        case TrainedDrafter():
            return hash_weights(drafter.model)
        case SmallLMDrafter():
            return hash_weights(drafter.model.model)
        case CombinedDrafter():
            return f"{_version_of(drafter.first)}, {_version_of(drafter.second)}"
    return None if drafter is None else drafter.version


def _sampling_of(config: Any) -> dict[str, Any]:
    known = {} if config is None else config.to_diff_dict()
    return {name: value for name, value in known.items() if name != "transformers_version"}


Advance = Callable[[int], None]  # told how many rows of the data are done


@dataclass
class Written:
    """What one start has done.

    Attributes:
        rows: that were written.
        left_out: unusable rows, of which those before an interruption may be counted again.
        answers: by the target.
        cut: answers that reached the longest length without an end.
        tokens: of all answers.
        forwards: of the target, after prefill.
    """

    rows: int = 0
    left_out: int = 0
    answers: int = 0
    cut: int = 0
    tokens: int = 0
    forwards: int = 0

    @property
    def tau(self) -> float:
        """Tokens per target forward after prefill."""
        return (self.tokens - self.answers) / self.forwards if self.forwards else 1.0


@dataclass
class _Open:
    """A row whose answers are being made."""

    number: int
    place: str
    dialogue: Dialogue
    question: list[int] = field(default_factory=list)
    turn: int = 0
    result: dict[str, Any] | None = None


class Regenerator:
    """Writes data anew with the target's own answers.

    Greedy rows are the same whatever the drafter, the batch size, or the places of interruptions,
    as far as rounding goes (see the README on float32). Drawn ones are too, for one drafter:
    another one draws other answers by the same law.

    Args:
        decoder: of the target, with its tokenizer, with or without a drafter.
        settings: how it answers.

    Raises:
        ConfigError: no question would fit beside so many new tokens.
    """

    def __init__(self, decoder: SpeculativeDecoder, settings: RegenerationSettings) -> None:
        if decoder.tokenizer is None:
            raise DataError("answers need a tokenizer", remedy="pass tokenizer= to the decoder")
        if settings.max_new_tokens >= (longest := decoder.target.spec.max_position):
            raise ConfigError(
                "max_new_tokens leaves no room for a question in the target's context",
                expected=f"less than {longest}",
                got=settings.max_new_tokens,
            )
        self._decoder = decoder
        self._tokenizer: PreTrainedTokenizerBase = decoder.tokenizer
        self._settings = settings

    def write(
        self, sources: Sequence[Source], output: OutputFile, advance: Advance = lambda _: None
    ) -> Written:
        """Write the rows that the file lacks.

        Args:
            sources: of the data.
            output: the file, which this claims.
            advance: is told of progress.

        Raises:
            ConfigError: the file was made otherwise, or is being written to.
            DataError: data is missing or malformed.
        """
        written, intake = Written(), Intake(self._settings.skip_bad_rows)
        with output.claim(identify(self._decoder, self._settings, sources)):
            advance(output.last_row)
            missing = self._missing(sources, output.last_row, intake)
            while group := list(islice(missing, self._settings.batch_size)):
                rows = [*self._answer(group, intake, written)]
                output.append(rows)
                written.rows += len(rows)
                written.left_out = intake.skipped
                advance(group[-1].number)
        written.left_out = intake.skipped
        return written

    def _missing(self, sources: Sequence[Source], last_row: int, intake: Intake) -> Iterator[_Open]:
        """Yield rows behind the last one, each with its first question."""
        for record in (record for source in sources for record in source.records(intake)):
            if intake.rows > last_row:
                with intake.guard():
                    yield self._opened(record, intake.rows)

    def _opened(self, record: Record, number: int) -> _Open:
        dialogue = dialogue_over(record, self._tokenizer, self._settings.prompt_tokens)
        row = _Open(number, record.place, dialogue)
        try:
            row.question = self._fitting(next(dialogue), row)
        except StopIteration as end:  # nothing but calls of tools
            row.result = end.value
        return row

    def _answer(
        self, group: Sequence[_Open], intake: Intake, written: Written
    ) -> Iterator[dict[str, Any]]:
        """Ask the questions of all rows turn by turn; yield the rows that could be finished."""
        waiting = [row for row in group if row.result is None]
        while waiting:
            outputs = self._decode(waiting)
            going_on = []
            for row, output in zip(waiting, outputs, strict=True):
                is_cut = self._is_cut(output)
                _count(output, is_cut, written)
                with intake.guard():
                    self._advance(row, Answer(output.new_token_ids, output.text or "", is_cut))
                    if row.result is None:
                        going_on.append(row)
            waiting = going_on
        yield from ({"row": row.number} | row.result for row in group if row.result is not None)

    def _advance(self, row: _Open, answer: Answer) -> None:
        row.turn += 1
        try:
            row.question = self._fitting(row.dialogue.send(answer), row)
        except StopIteration as end:
            row.result = end.value

    def _decode(self, rows: Sequence[_Open]) -> list[GenerateOutput]:
        return self._decoder.generate_batch(
            [row.question for row in rows],
            temperature=self._settings.temperature,
            max_new_tokens=self._settings.max_new_tokens,
            seed=[_key(self._settings.seed, row.number, row.turn) for row in rows],
        )

    def _fitting(self, question: list[int], row: _Open) -> list[int]:
        spec, new = self._decoder.target.spec, self._settings.max_new_tokens
        if not question or len(question) + new > spec.max_position:
            raise RowError(
                f"a question of {row.place} does not fit into the target's context",
                expected=f"1 to {spec.max_position - new} tokens beside {new} new ones",
                got=len(question),
                remedy="lower --max-new-tokens, or skip such rows",
            )
        if max(question) >= spec.vocab_size:
            raise RowError(
                f"{row.place} has a token that the target does not have",
                expected=f"ids from 0 to {spec.vocab_size - 1}",
                got=max(question),
                remedy="use the target's own tokenizer",
            )
        return question

    def _is_cut(self, output: GenerateOutput) -> bool:
        is_long = len(output.new_token_ids) >= self._settings.max_new_tokens
        return is_long and output.new_token_ids[-1] not in _ends(self._decoder)


def _count(output: GenerateOutput, is_cut: bool, written: Written) -> None:
    written.answers += 1
    written.cut += is_cut
    written.tokens += len(output.new_token_ids)
    written.forwards += output.stats.target_forwards


def _key(*parts: int) -> int:
    """Return a seed that differs for different numbers."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _ends(decoder: SpeculativeDecoder) -> list[int]:
    config = decoder.target.model.generation_config
    ends = None if config is None else config.eos_token_id
    if ends is None:
        return []
    return ends if isinstance(ends, list) else [ends]
