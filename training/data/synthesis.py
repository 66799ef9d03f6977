"""Synthesized training data: the target writes both the users' turns and its own answers.

A chat model that is given its template up to the point where the user's text begins, and is
sampled, writes a user's turn (Magpie, arXiv 2406.08464). The template then continues, and the
target answers. A base model, which has no template, writes whole texts from its first token.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from inference.decoder import SpeculativeDecoder
from inference.outputs import GenerateOutput
from jakiro.errors import ConfigError, DataError
from jakiro.utils.settings import Settings
from training.data.chat import CUT, Chat, Message
from training.data.regeneration.output_file import OutputFile
from training.data.regeneration.regenerator import ends_of, random_seed, target_fingerprint
from training.data.rendering import render_question, render_user_opening

KEY_TOKENS = 8  # records that begin with the same tokens are duplicates
NGRAM, MOST_REPEATS = 8, 3  # an n-gram that occurs more often is a loop
LONGEST_SILENCE = 1000  # candidates without a usable record, after which synthesis gives up


class SynthesisSettings(Settings):
    """Settings of the synthesis.

    Attributes:
        conversations: number of records to write, earlier ones in the file included.
        kind: "chats", which need a chat template, or "texts".
        multi_turn: share of the conversations that have two to `max_turns` questions.
        max_turns: largest number of questions in a conversation.
        greedy: share of the conversations with greedy answers; the others are sampled.
        temperature: sampling temperature of questions, texts and sampled answers.
        top_p: nucleus of the sampled tokens.
        max_question_tokens: largest number of tokens in a question; longer ones are dropped.
        max_new_tokens: largest number of tokens in an answer or a text.
        seed: random seed; a record depends only on this seed and on its number.
        batch_size: number of records written together, which affects only speed and memory use.
    """

    conversations: int = Field(ge=1)
    kind: Literal["chats", "texts"] = "chats"
    multi_turn: float = Field(0.3, ge=0, le=1)
    max_turns: int = Field(3, ge=1)
    greedy: float = Field(0.5, ge=0, le=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(0.99, gt=0, le=1)
    max_question_tokens: int = Field(256, ge=KEY_TOKENS)
    max_new_tokens: int = Field(512, ge=1)
    seed: int = Field(0, ge=0)
    batch_size: int = Field(16, ge=1)


@dataclass
class SynthesisCounts:
    """Counts of one run of the synthesizer.

    Attributes:
        records: number of records written.
        tokens: total number of generated tokens, including those of dropped records.
        dropped: number of dropped candidates for each reason.
    """

    records: int = 0
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass
class _Candidate:
    """A record that is being written."""

    number: int
    is_greedy: bool
    num_turns: int
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    reason: str | None = None  # why the candidate ended early

    @property
    def beginning(self) -> str:
        """The first question, or the text; empty if there is neither."""
        return str(self.messages[0]["content"]) if self.messages else self.text


OnProgress = Callable[[int, int], None]  # receives the numbers of records and of new tokens


class Synthesizer:
    """Writes records that the target makes up.

    Apart from rounding (see docs/concepts/rounding.md), records depend neither on the batch size
    nor on interruptions.

    Args:
        decoder: decoder of the target, with its tokenizer, with or without a drafter.
        settings: settings of the synthesis.

    Raises:
        ConfigError: the settings leave no room in the target's context.
        DataError: the tokenizer is missing, or has no chat template for conversations; or the
            target has no first token for texts.
    """

    def __init__(self, decoder: SpeculativeDecoder, settings: SynthesisSettings) -> None:
        if decoder.tokenizer is None:
            raise DataError("synthesis needs a tokenizer", remedy="pass tokenizer= to the decoder")
        self._decoder = decoder
        self._tokenizer: PreTrainedTokenizerBase = decoder.tokenizer
        self._settings = settings
        self._ends = frozenset(ends_of(decoder))
        self._special = frozenset(decoder.tokenizer.all_special_ids)
        self._check_target()

    def write(
        self, output: OutputFile, on_progress: OnProgress = lambda _records, _tokens: None
    ) -> SynthesisCounts:
        """Write records until the file contains as many as the settings ask for.

        Args:
            output: output file, which is locked while it is written to.
            on_progress: callback after every batch.

        Raises:
            ConfigError: the file was made with other settings, or another process writes to it.
            DataError: the target writes nothing usable.
        """
        settings, counts = self._settings, SynthesisCounts()
        with output.claim(self._fingerprint()):
            seen = {self._key(_beginning_of(record)) for record in output.records()}
            number, silence = output.last_record, 0
            while (missing := settings.conversations - output.num_records) > 0:
                numbers = range(number + 1, number + 1 + settings.batch_size)
                records = list(self._records(numbers, seen, counts))[:missing]
                output.append(records)
                counts.records += len(records)
                number = numbers[-1]
                silence = 0 if records else silence + len(numbers)
                on_progress(output.num_records, counts.tokens)
                if silence >= LONGEST_SILENCE:
                    raise _nothing_usable(counts)
        return counts

    def _records(
        self, numbers: Sequence[int], seen: set[tuple[int, ...]], counts: SynthesisCounts
    ) -> Iterator[dict[str, Any]]:
        """Write a batch of candidates, and yield the usable ones, in order, as records."""
        candidates = [self._candidate(number) for number in numbers]
        if self._settings.kind == "chats":
            self._converse(candidates, counts)
        else:
            self._write_texts(candidates, counts)
        for candidate in candidates:
            key = self._key(candidate.beginning)
            if not key or key in seen:
                counts.dropped["duplicate" if key else candidate.reason or "empty"] += 1
                continue
            seen.add(key)
            content = {"messages": candidate.messages} if candidate.messages else {}
            text = {"text": candidate.text} if candidate.text else {}
            yield {"row": candidate.number, **content, **text}

    def _key(self, beginning: str) -> tuple[int, ...]:
        return tuple(self._encoded(beginning)[:KEY_TOKENS])

    def _candidate(self, number: int) -> _Candidate:
        settings, random = self._settings, Random(random_seed(self._settings.seed, number))
        is_greedy = random.random() < settings.greedy
        is_multi_turn = settings.max_turns > 1 and random.random() < settings.multi_turn
        num_turns = random.randint(2, settings.max_turns) if is_multi_turn else 1
        return _Candidate(number, is_greedy, num_turns)

    def _converse(self, candidates: Sequence[_Candidate], counts: SynthesisCounts) -> None:
        """Write questions and answers turn by turn, until each conversation ends."""
        for turn in range(self._settings.max_turns):
            asking = [one for one in candidates if one.reason is None and turn < one.num_turns]
            asked = self._questions(asking, turn, counts)
            for is_greedy in (False, True):
                group = [one for one in asked if one.is_greedy is is_greedy]
                self._answers(group, turn, is_greedy, counts)

    def _questions(
        self, candidates: Sequence[_Candidate], turn: int, counts: SynthesisCounts
    ) -> list[_Candidate]:
        """Add a question to every conversation, and return the conversations that got one."""
        prompts = [
            self._encoded(render_user_opening(self._tokenizer, _chat(candidate)))
            for candidate in candidates
        ]
        limit = self._settings.max_question_tokens
        asked = []
        for candidate, output in self._generated(
            candidates, prompts, limit, 2 * turn, counts, is_greedy=False
        ):
            ids, text = self._content(output)
            candidate.reason = self._fault(output, ids, text, KEY_TOKENS // 2)
            if candidate.reason is None:
                candidate.messages.append({"role": "user", "content": text})
                asked.append(candidate)
        return asked

    def _answers(
        self,
        candidates: Sequence[_Candidate],
        turn: int,
        is_greedy: bool,
        counts: SynthesisCounts,
    ) -> None:
        """Answer the last question of every conversation, or remove the question."""
        prompts = [
            self._encoded(render_question(self._tokenizer, _chat(candidate)))
            for candidate in candidates
        ]
        limit = self._settings.max_new_tokens
        for candidate, output in self._generated(
            candidates, prompts, limit, 2 * turn + 1, counts, is_greedy=is_greedy
        ):
            ids, text = self._content(output)
            is_cut = self._is_cut(output)
            candidate.reason = self._fault(output, ids, text, 1, may_be_cut=True)
            if candidate.reason is not None:
                candidate.messages.pop()
                continue
            mark = {CUT: True} if is_cut else {}
            candidate.messages.append({"role": "assistant", "content": text} | mark)
            candidate.reason = "cut off" if is_cut else None  # a missing end has no next question

    def _write_texts(self, candidates: Sequence[_Candidate], counts: SynthesisCounts) -> None:
        prompts = [[self._first_token()] for _ in candidates]
        limit = self._settings.max_new_tokens
        for candidate, output in self._generated(
            candidates, prompts, limit, 0, counts, is_greedy=False
        ):
            ids, text = self._content(output)
            candidate.reason = self._fault(output, ids, text, KEY_TOKENS, may_be_cut=True)
            if candidate.reason is None:
                candidate.text = text

    def _generated(
        self,
        candidates: Sequence[_Candidate],
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        part: int,
        counts: SynthesisCounts,
        *,
        is_greedy: bool,
    ) -> Iterator[tuple[_Candidate, GenerateOutput]]:
        """Yield what the target writes after each prompt that fits into its context."""
        room = self._decoder.target.spec.max_position - max_new_tokens
        fitting = []
        for candidate, prompt in zip(candidates, prompts, strict=True):
            if len(prompt) <= room:
                fitting.append((candidate, prompt))
            else:
                candidate.reason = "too long"
        if not fitting:
            return
        sampling: dict[str, Any] = {} if is_greedy else {"top_p": self._settings.top_p}
        outputs = self._decoder.generate_batch(
            [prompt for _, prompt in fitting],
            temperature=0.0 if is_greedy else self._settings.temperature,
            max_new_tokens=max_new_tokens,
            seed=[random_seed(self._settings.seed, one.number, part) for one, _ in fitting],
            **sampling,
        )
        for (candidate, _), output in zip(fitting, outputs, strict=True):
            counts.tokens += len(output.new_token_ids)
            yield candidate, output

    def _content(self, output: GenerateOutput) -> tuple[list[int], str]:
        """Return the tokens before the end, and their text."""
        ids = output.new_token_ids
        ids = ids[:-1] if ids and ids[-1] in self._ends else ids
        return ids, str(self._tokenizer.decode(ids, skip_special_tokens=True)).strip()

    def _fault(
        self,
        output: GenerateOutput,
        ids: Sequence[int],
        text: str,
        fewest: int,
        may_be_cut: bool = False,
    ) -> str | None:
        """Return the reason to drop what the target wrote; None if it is usable."""
        if len(ids) < fewest or not text:
            return "too short"
        if self._is_cut(output) and not may_be_cut:
            return "no end"
        if not self._special.isdisjoint(ids):
            return "special tokens"
        return "repetition" if repeats(ids) else None

    def _is_cut(self, output: GenerateOutput) -> bool:
        return not output.new_token_ids or output.new_token_ids[-1] not in self._ends

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _first_token(self) -> int:
        config = self._decoder.target.model.generation_config
        first = self._tokenizer.bos_token_id
        if first is None:
            first = None if config is None else config.bos_token_id
        if first is None:
            first = next(iter(self._ends), None)
        if first is None:
            raise DataError(
                "the target has no token that begins a text",
                expected="a bos_token or an eos_token",
                got=type(self._tokenizer).__name__,
                remedy="continue texts of your own with `jakiro regenerate`",
            )
        return int(first)

    def _check_target(self) -> None:
        settings, longest = self._settings, self._decoder.target.spec.max_position
        wanted = settings.max_question_tokens + settings.max_new_tokens
        if wanted >= longest:
            raise ConfigError(
                "a question and its answer do not fit into the target's context",
                expected=f"max_question_tokens and max_new_tokens below {longest} together",
                got=wanted,
                remedy="lower --max-new-tokens or --max-question-tokens",
            )
        if settings.kind == "texts":
            self._first_token()
        elif self._tokenizer.chat_template is None:
            raise DataError(
                f"the tokenizer of {self._decoder.target.model.name_or_path} has no chat template",
                expected="a chat model",
                got="a tokenizer without a template, as base models have",
                remedy="pass --kind texts, which writes texts",
            )

    def _fingerprint(self) -> dict[str, Any]:
        """Return everything that determines the records."""
        chosen = self._settings.model_dump(exclude={"batch_size", "conversations"})
        return target_fingerprint(self._decoder, is_sampled=True) | chosen


def repeats(token_ids: Sequence[int]) -> bool:
    """Return whether an n-gram of tokens occurs so often that the text is a loop."""
    grams = zip(*(token_ids[start:] for start in range(NGRAM)), strict=False)
    return max(Counter(grams).values(), default=0) > MOST_REPEATS


def _beginning_of(record: dict[str, Any]) -> str:
    return str(record["messages"][0]["content"] if "messages" in record else record["text"])


def _chat(candidate: _Candidate) -> Chat:
    return Chat(candidate.messages, None, f"conversation {candidate.number}")


def _nothing_usable(counts: SynthesisCounts) -> DataError:
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.dropped.most_common())
    return DataError(
        f"none of the last {LONGEST_SILENCE} conversations can be used",
        expected="a chat model that ends its turns",
        got=f"dropped: {reasons}",
        remedy="check the target's end tokens and chat template, or lower --temperature",
    )
