"""Replacement of the answers in the data with answers that the target generates in batches."""

import hashlib
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from inference.decoder import SpeculativeDecoder
from inference.generation.prompts import needed
from inference.loading import identity_of
from inference.outputs import GenerateOutput
from inference.protocol import Drafter
from jakiro.target.record import hash_weights, template_fingerprint, tokenizer_fingerprint
from jakiro.utils.files import fingerprint
from jakiro.utils.pretrained import end_ids
from jakiro.utils.token_text import REPLACEMENT, text_of_tokens
from jakiro.utils.wording import dtype_name
from training.data.dialogues import Dialogue, Turn, run_dialogues
from training.data.documents import FORMS, check_vocabulary, form_of, read_tokens
from training.data.generation import OutputFile, RegenerationSettings
from training.data.rendering import CUT, chat_of, render_question
from training.data.sources import Intake, Record, RecordError, Source

Fields = dict[str, Any]

# Keys that the new record does not take over from the old one.
_REPLACED = {*FORMS, "tools", "loss_mask", "record", CUT}

# Receives the number of the last finished record and the number of tokens generated so far.
OnProgress = Callable[[int, int], None]


def fingerprint_fields(
    decoder: SpeculativeDecoder, settings: RegenerationSettings, sources: Sequence[Source]
) -> Fields:
    facts = target_fingerprint(decoder) | {
        "data": [source.fingerprint() for source in sources],
        # An unusable record ends the command unless it is skipped; it changes no other record.
        **settings.model_dump(exclude={"batch_size", "seed", "skip_bad_records"}),
    }
    if settings.temperature:  # greedy answers depend on neither the seed nor the drafter
        facts |= {"seed": settings.seed, "drafter": version_of(decoder.drafter)}
    return facts


def target_fingerprint(decoder: SpeculativeDecoder) -> Fields:
    """Return everything about the target that determines the generated tokens, by name."""
    target, tokenizer = decoder.target, needed(decoder.tokenizer)
    config = target.model.generation_config
    sampling = {} if config is None else config.to_diff_dict()
    sampling.pop("transformers_version", None)
    return {
        "target_dtype": dtype_name(target.dtype),
        "target_weights": hash_weights(target.model),
        "generation_config": sampling,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": template_fingerprint(tokenizer),
    }


def version_of(drafter: Drafter | None) -> str | None:
    return None if drafter is None else fingerprint(identity_of(drafter))


class Answer(NamedTuple):
    """An answer of the target; `is_cut` is true if it reached the length limit before its end."""

    token_ids: list[int]
    text: str
    is_cut: bool


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


class Regenerator:
    """Writes the records of the data, with answers that the target generates.

    Apart from rounding (see docs/concepts/rounding.md), greedy answers do not depend on the
    drafter, the batch size or interruptions. Sampled answers do not depend on the batch size or on
    interruptions; with a different drafter, they differ but have the same distribution.
    """

    def __init__(self, decoder: SpeculativeDecoder, settings: RegenerationSettings) -> None:
        self._decoder = decoder
        self._tokenizer: PreTrainedTokenizerBase = needed(decoder.tokenizer)
        self._settings = settings
        self._ends = end_ids(decoder.target.model.generation_config)
        self._counts = RegenerationCounts()
        self._intake = Intake()

    def write(
        self,
        sources: Sequence[Source],
        output: OutputFile,
        on_progress: OnProgress = lambda _record, _tokens: None,
    ) -> RegenerationCounts:
        counts = self._counts = RegenerationCounts()
        intake = self._intake = Intake(self._settings.skip_bad_records)
        with output.claim(fingerprint_fields(self._decoder, self._settings, sources)):
            on_progress(output.last_record, 0)
            dialogues = self._dialogues(sources, output.last_record)
            finished = run_dialogues(self._decoder, dialogues, self._settings.batch_size)
            with closing(finished):
                for number, fields in finished:
                    if fields is not None:
                        output.append({"record": number} | fields)
                        counts.records += 1
                    on_progress(number, counts.tokens)
        counts.left_out = intake.num_skipped
        return counts

    def _dialogues(
        self, sources: Sequence[Source], last_record: int
    ) -> Iterator[Dialogue[tuple[int, Fields | None]]]:
        for source in sources:
            for record in source.records(self._intake):
                if self._intake.num_records > last_record:
                    yield self._regenerate(record, self._intake.num_records)

    def _regenerate(self, record: Record, number: int) -> Dialogue[tuple[int, Fields | None]]:
        fields = None
        with self._intake.guard():
            ask = partial(self._ask, record, number, count())
            fields = yield from new_fields(
                record, self._tokenizer, self._settings.prompt_tokens, ask
            )
        return number, fields

    def _ask(
        self, record: Record, number: int, turns: Iterator[int], question: list[int]
    ) -> Dialogue[Answer]:
        spec, limit = self._decoder.target.spec, self._settings.max_new_tokens
        if not question or len(question) + limit > spec.max_position:
            raise RecordError(
                f"a question of {record.location} does not fit into the target's context",
                expected=f"1 to {spec.max_position - limit} tokens, followed by {limit} new tokens",
                got=len(question),
                remedy="lower --max-new-tokens",
            )
        check_vocabulary(max(question), record.location, spec.vocab_size)
        seed = random_seed(self._settings.seed, number, next(turns))
        output = yield Turn(question, seed, self._settings.temperature, {"max_new_tokens": limit})
        is_cut = not has_ended(output, self._ends, limit)
        self._counts.answers += 1
        self._counts.cut += is_cut
        self._counts.tokens += len(output.new_token_ids)
        self._counts.forwards += output.stats.target_forwards
        return Answer(output.new_token_ids, output.text or "", is_cut)


# Returns the answer to a question, given as token ids, within a dialogue.
Ask = Callable[[list[int]], Generator[Any, Any, Answer]]


def new_fields(
    record: Record, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int, ask: Ask
) -> Generator[Any, Any, Fields]:
    """Return a record with new answers, in the form of the old one.

    In a conversation, only the assistant's answers are replaced, and a question at its end is
    answered. Turns with tool calls are kept, because later turns contain the results of the calls.
    A text keeps its beginning, and a record of token ids keeps the tokens before the first
    response.
    """
    key = form_of(record)
    if key == "text":
        new = yield from _continue_text(record, tokenizer, prompt_tokens, ask)
    elif key == "input_ids":
        new = yield from _continue_tokens(record, ask)
    else:
        new = yield from _answer_turns(record, key, tokenizer, ask)
    # Fields that have nothing to do with the answers, such as an id, are kept.
    return {name: value for name, value in record.fields.items() if name not in _REPLACED} | new


def _answer_turns(
    record: Record, key: str, tokenizer: PreTrainedTokenizerBase, ask: Ask
) -> Generator[Any, Any, Fields]:
    chat = chat_of(record, key, may_ask=True)
    if chat.messages[-1]["role"] == "user":
        chat.messages.append({"role": "assistant"})
    new = chat._replace(messages=[])
    for index, turn in enumerate(chat.messages):
        if index in chat.answers and "tool_calls" not in turn:
            question = render_question(tokenizer, new)
            answer = yield from ask(tokenizer(question, add_special_tokens=False)["input_ids"])
            turn = {"role": "assistant", **_written("content", answer.text, answer)}
        new.messages.append(turn)
    return {"messages": new.messages} | ({"tools": chat.tools} if chat.tools else {})


def _continue_text(
    record: Record, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int, ask: Ask
) -> Generator[Any, Any, Fields]:
    text = record.fields["text"]
    ids = tokenizer(text)["input_ids"] if isinstance(text, str) else []
    start = ids[: min(prompt_tokens, len(ids) // 2)]
    if not start:
        raise RecordError(f"{record.location} contains no text to be continued: {repr(text)[:80]}")
    answer = yield from ask(start)
    return _written("text", text_of_tokens(tokenizer, [*start, *answer.token_ids]), answer)


def _continue_tokens(record: Record, ask: Ask) -> Generator[Any, Any, Fields]:
    document = read_tokens(record)
    begin = int(document.is_response.argmax()) if document.is_response.any() else 0
    if begin == 0:
        raise RecordError(f"{record.location} has no prompt before a response in its loss_mask")
    prompt = document.token_ids[:begin].tolist()
    new = (yield from ask(prompt)).token_ids
    # A cut answer needs no mark, because no end token is added to token ids in training.
    return {"input_ids": [*prompt, *new], "loss_mask": [0] * begin + [1] * len(new)}


def _written(key: str, text: str, answer: Answer) -> Fields:
    """Return a text that ends with an answer; a cut answer is marked, and has whole characters."""
    return {key: text.rstrip(REPLACEMENT), CUT: True} if answer.is_cut else {key: text}


def random_seed(*parts: int) -> int:
    """Return a random seed that depends on all `parts` and their order."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def has_ended(output: GenerateOutput, ends: Collection[int], limit: int) -> bool:
    """Return whether the target ended an answer itself, with an end token or a stop string."""
    new = output.new_token_ids
    return bool(new) and (len(new) < limit or new[-1] in ends)
