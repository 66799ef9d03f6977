"""Replacement of the answers in the data with answers that the target generates in batches."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from inference.decoder import SpeculativeDecoder
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.generation.prompts import needed
from inference.outputs import GenerateOutput
from inference.protocol import Drafter
from jakiro.target.record import hash_weights, template_fingerprint, tokenizer_fingerprint
from jakiro.utils.dtype_names import dtype_name
from jakiro.utils.pretrained import end_ids
from training.data.dialogues import Dialogue, Turn, run_dialogues
from training.data.documents import check_vocabulary
from training.data.regeneration.output_file import OutputFile
from training.data.regeneration.rows import Answer, RecordDialogue, dialogue_over
from training.data.regeneration.settings import RegenerationSettings
from training.data.sources import Intake, Record, RecordError, Source


def fingerprint_fields(
    decoder: SpeculativeDecoder, settings: RegenerationSettings, sources: Sequence[Source]
) -> dict[str, Any]:
    """Return everything that determines the new records, by name."""
    facts = target_fingerprint(decoder) | {
        "data": [source.fingerprint() for source in sources],
        # An unusable record ends the command unless it is skipped; it changes no other record.
        **settings.model_dump(exclude={"batch_size", "seed", "skip_bad_records"}),
    }
    if settings.temperature:  # greedy answers depend on neither the seed nor the drafter
        facts |= {"seed": settings.seed, "drafter": version_of(decoder.drafter)}
    return facts


def target_fingerprint(decoder: SpeculativeDecoder) -> dict[str, Any]:
    """Return everything about the target that determines the generated tokens, by name."""
    target, tokenizer = decoder.target, needed(decoder.tokenizer)
    return {
        "target_dtype": dtype_name(target.dtype),
        "target_weights": hash_weights(target.model),
        "generation_config": _sampling_of(target.model.generation_config),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": template_fingerprint(tokenizer),
    }


def version_of(drafter: Drafter | None) -> str | None:
    """Return a hash of a drafter's weights, or its version if it has none; None for no drafter."""
    match drafter:
        case TrainedDrafter():
            return hash_weights(drafter.model)
        case SmallLMDrafter():
            return hash_weights(drafter.model.model)
        case CombinedDrafter():
            return f"{version_of(drafter.first)}, {version_of(drafter.second)}"
    return None if drafter is None else drafter.version


def _sampling_of(config: Any) -> dict[str, Any]:
    known = {} if config is None else config.to_diff_dict()
    return {name: value for name, value in known.items() if name != "transformers_version"}


# Receives the number of the last finished record and the number of tokens generated so far.
OnProgress = Callable[[int, int], None]


@dataclass
class RegenerationCounts:
    """Counts of one run of the regenerator."""

    records: int = 0
    left_out: int = 0
    answers: int = 0
    cut: int = 0
    tokens: int = 0
    forwards: int = 0

    @property
    def tau(self) -> float:
        """The mean acceptance length: tokens per forward pass of the target after prefill."""
        return (self.tokens - self.answers) / self.forwards if self.forwards else 1.0


@dataclass
class _OpenRecord:
    """A record whose answers are being generated."""

    number: int
    location: str
    dialogue: RecordDialogue
    question: list[int] = field(default_factory=list)
    turn: int = 0
    is_unusable: bool = False
    result: dict[str, Any] | None = None


class Regenerator:
    """Writes the records of the data, with answers that the target generates.

    Apart from rounding (see docs/concepts/rounding.md), greedy answers do not depend on the
    drafter, the batch size or interruptions. Sampled answers do not depend on the batch size or on
    interruptions; with a different drafter, they differ but have the same distribution.

    Args:
        settings: settings of the regeneration.
    """

    def __init__(self, decoder: SpeculativeDecoder, settings: RegenerationSettings) -> None:
        self._decoder = decoder
        self._tokenizer: PreTrainedTokenizerBase = needed(decoder.tokenizer)
        self._settings = settings

    def write(
        self,
        sources: Sequence[Source],
        output: OutputFile,
        on_progress: OnProgress = lambda _record, _tokens: None,
    ) -> RegenerationCounts:
        """Write the records that the file does not contain yet."""
        written, intake = RegenerationCounts(), Intake(self._settings.skip_bad_records)
        facts = fingerprint_fields(self._decoder, self._settings, sources)
        with output.claim(facts):
            on_progress(output.last_record, 0)
            dialogues = (
                self._answer(record, intake, written)
                for record in self._missing(sources, output.last_record, intake)
            )
            finished = run_dialogues(self._decoder, dialogues, self._settings.batch_size)
            with closing(finished):
                for record in finished:
                    if record.result is not None:
                        output.append([{"record": record.number} | record.result])
                        written.records += 1
                    on_progress(record.number, written.tokens)
        written.left_out = intake.num_skipped
        return written

    def _missing(
        self, sources: Sequence[Source], last_record: int, intake: Intake
    ) -> Iterator[_OpenRecord]:
        """Yield the records that follow the file's last record, each with its first question."""
        for record in (record for source in sources for record in source.records(intake)):
            if intake.num_records > last_record:
                with intake.guard():
                    yield self._open(record, intake.num_records)

    def _open(self, record: Record, number: int) -> _OpenRecord:
        dialogue = dialogue_over(record, self._tokenizer, self._settings.prompt_tokens)
        opened = _OpenRecord(number, record.location, dialogue)
        try:
            opened.question = self._fitting(next(dialogue), opened)
        except StopIteration as end:  # the record needs no answer
            opened.result = end.value
        return opened

    def _answer(
        self, record: _OpenRecord, intake: Intake, written: RegenerationCounts
    ) -> Dialogue[_OpenRecord]:
        """Generate the answers of a record; a record that has no result afterwards is unusable."""
        temperature = self._settings.temperature
        limit = self._settings.max_new_tokens
        ends = end_ids(self._decoder.target.model.generation_config)
        while record.result is None and not record.is_unusable:
            seed = random_seed(self._settings.seed, record.number, record.turn)
            output = yield Turn(record.question, seed, temperature, {"max_new_tokens": limit})
            is_cut = not has_ended(output, ends, limit)
            written.answers += 1
            written.cut += is_cut
            written.tokens += len(output.new_token_ids)
            written.forwards += output.stats.target_forwards
            record.is_unusable = True
            with intake.guard():
                record.turn += 1
                answer = Answer(output.new_token_ids, output.text or "", is_cut)
                try:
                    record.question = self._fitting(record.dialogue.send(answer), record)
                except StopIteration as end:
                    record.result = end.value
                record.is_unusable = False
        return record

    def _fitting(self, question: list[int], record: _OpenRecord) -> list[int]:
        spec, new = self._decoder.target.spec, self._settings.max_new_tokens
        if not question or len(question) + new > spec.max_position:
            raise RecordError(
                f"a question of {record.location} does not fit into the target's context",
                expected=f"1 to {spec.max_position - new} tokens, followed by {new} new tokens",
                got=len(question),
                remedy="lower --max-new-tokens",
            )
        check_vocabulary(max(question), record.location, spec.vocab_size)
        return question


def random_seed(*parts: int) -> int:
    """Return a random seed that depends on all `parts` and their order."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def has_ended(output: GenerateOutput, ends: Collection[int], limit: int) -> bool:
    """Return whether the target ended an answer itself, with an end token or a stop string."""
    new = output.new_token_ids
    return bool(new) and (len(new) < limit or new[-1] in ends)
