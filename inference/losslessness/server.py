"""`jakiro verify --url`: checks that a running server's texts are those of its target.

Servers with OpenAI's interface return texts, not token ids. Greedy texts are compared with the text
of the target's own tokens. Sampled texts are compared token by token if the server names the tokens
of its texts; if not, they consist of a single token.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import Field, computed_field
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.client.client import ServerAnswer, ServerClient, ServerPrompt
from inference.generation.prompts import Prompt, encode_prompt
from inference.losslessness.records import (
    DISTRIBUTION_TESTS,
    FALSE_ALARM,
    DistributionCheck,
    FirstDifference,
    Report,
    Result,
    SupportCheck,
    VerifySettings,
    counted_differences,
)
from inference.losslessness.reference import Reference, Tokens, rounding
from inference.losslessness.sampled import compare_samples
from jakiro.errors import PromptError, ResourceError
from jakiro.target.checks import CausalLM
from jakiro.utils.dtype_names import dtype_name
from jakiro.utils.pretrained import end_ids
from jakiro.utils.progress import Track, untracked
from jakiro.utils.token_text import REPLACEMENT, text_of_tokens
from jakiro.utils.wording import counted

_SAMPLE_LENGTH = 6  # number of tokens of a sampled text; longer texts rarely have a cell
_REPEATED_SEEDS = 20  # number of samples that are requested twice
_MOST_CANDIDATES = 200  # likeliest tokens among which the server's token is searched
_SHOWN = 40  # characters of a text


class ServerVerifySettings(VerifySettings):
    """Settings of the verification of a server."""

    model: str | None = None  # name of the model; None for the only one that the server has
    chat: bool = False  # whether a text is sent as the message of a user
    # not stored, because the server's drafter is not loaded here
    other_weights: bool = Field(False, exclude=True)


class TextDifference(FirstDifference):
    """The first token at which a server's greedy text differs from the target's own."""

    # likeliest token that agrees with the server's text; None if there is no such token
    server_token: int | None
    target_text: str  # the beginning of the rest of each text
    server_text: str

    def __str__(self) -> str:
        return self.described(f"target {self.target_text!r}, server {self.server_text!r}")


class GreedyTextCheck(Result):
    """Comparison of a server's greedy texts with the target's own."""

    name: Literal["greedy texts"] = "greedy texts"
    prompts: int
    tokens: int  # number of equal tokens before the first differences, over all prompts
    drafted: int | None  # number of accepted drafts in all texts; None if not reported
    differences: tuple[TextDifference, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether all differences are near-ties."""
        return all(difference.is_near_tie for difference in self.differences)

    @property
    def details(self) -> tuple[str, ...]:
        """A line for each difference."""
        return tuple(map(str, self.differences))

    def __str__(self) -> str:
        equal = f"{counted(self.prompts, 'prompt')}, {self.tokens} tokens equal"
        return f"{equal}; {counted_differences(self.differences)}"


class SeedCheck(Result):
    """Comparison of texts with the same seed."""

    name: Literal["seeds"] = "seeds"
    texts: int
    same: int
    drafted: int | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether the same seed always gave the same text."""
        return self.same == self.texts

    def __str__(self) -> str:
        return f"{self.same} of {self.texts} texts are the same if they are requested again"


ServerCheck = GreedyTextCheck | SeedCheck | DistributionCheck | SupportCheck


class ServerReport(Report):
    """The results of all checks of a server; `dtype` is that of the target in this process."""

    url: str
    model: str
    system_fingerprints: tuple[str, ...]  # without repetitions, from the server's answers
    settings: ServerVerifySettings
    checks: tuple[ServerCheck, ...]
    notes: tuple[str, ...]  # what cannot be checked through the interface, or what looks wrong

    @property
    def _hint(self) -> str:  # the server's dtype is not known
        return (
            "; if the server computes in half precision, rounding may be the cause: serve the "
            "target in float32, and verify again with --dtype float32"
        )


def verify_server(
    client: ServerClient,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: ServerVerifySettings,
    on_check: Callable[[ServerCheck], None] = lambda _: None,
    track: Track = untracked,
) -> ServerReport:
    """Return a report on whether a server's greedy and sampled texts are those of its target."""
    if not prompts:
        raise PromptError(
            "there are no prompts to verify with", expected="at least one prompt", got=0
        )
    return _Verification(client, model, tokenizer, prompts, settings, on_check, track).run()


class _Verification:
    """The checks of one server; the arguments are those of `verify_server`."""

    def __init__(
        self,
        client: ServerClient,
        model: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        settings: ServerVerifySettings,
        on_check: Callable[[ServerCheck], None],
        track: Track,
    ) -> None:
        if not client.is_own:  # other servers do not have the defaults of transformers
            explicit = {"top_p": settings.top_p or 1.0, "top_k": settings.top_k or 0}
            settings = settings.model_copy(update=explicit)
        self.client, self.model, self.tokenizer, self.settings = client, model, tokenizer, settings
        self.on_check, self.track = on_check, track
        config: Any = model.config
        self.vocab_size = int(config.get_text_config().vocab_size)
        self.prompts: list[Any] = [
            [{"role": "user", "content": prompt}]
            if settings.chat and isinstance(prompt, str)
            else prompt
            for prompt in prompts[: settings.num_prompts]
        ]
        self.encoded = [
            encode_prompt(prompt, tokenizer, self.vocab_size) for prompt in self.prompts
        ]
        self.checks: list[ServerCheck] = []
        self.notes: list[str] = []
        self.fingerprints: set[str] = set()

    def run(self) -> ServerReport:
        self._check_greedy()
        for index in range(min(self.settings.sampled_prompts, len(self.prompts))):
            self._check_sampled(index)
        if all(check.drafted is None for check in self.checks):
            self.notes.append(
                "the server does not report how many drafts were accepted, so it is not known "
                "whether the checks concern drafts"
            )
        return ServerReport(
            url=self.client.url,
            model=self.client.model,
            system_fingerprints=tuple(sorted(self.fingerprints)),
            target=self.model.name_or_path,
            dtype=dtype_name(self.model.dtype),
            settings=self.settings,
            checks=tuple(self.checks),
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _check_greedy(self) -> None:
        most = self.settings.max_new_tokens
        fields = {"max_tokens": most, "temperature": 0.0}
        answers = self._ask("greedy texts", [(prompt, fields) for prompt in self.prompts])
        tokens, differences = 0, []
        for number, (ids, answer) in enumerate(zip(self.encoded, answers, strict=True), start=1):
            if answer.prompt_tokens not in (None, len(ids)):
                self.notes.append(
                    f"prompt {number} has {len(ids)} tokens here, but the server counts "
                    f"{answer.prompt_tokens}: its tokenizer or chat template may be another one"
                )
            compared = TextComparison(Reference(self.model, ids), self.tokenizer, answer, most)
            tokens += compared.num_equal
            if not compared.is_equal:
                differences.append(compared.difference(number))
        self._add(
            GreedyTextCheck(
                prompts=len(answers),
                tokens=tokens,
                drafted=drafted_in(answers),
                differences=tuple(differences),
            )
        )

    def _check_sampled(self, index: int) -> None:
        settings = self.settings
        fields: dict[str, Any] = {
            "max_tokens": settings.sample_length or _SAMPLE_LENGTH,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "log_probs": True,
        }
        if settings.top_k is not None and self.client.is_own:
            fields["jakiro"] = {"top_k": settings.top_k or self.vocab_size}
        elif settings.top_k:
            fields["top_k"] = settings.top_k
        probe = self.client.ask(self.prompts[index], **fields, seed=settings.seed)
        if not probe.tokens:
            fields |= {"max_tokens": 1, "log_probs": False}
            self.notes.append(
                "the server does not name the tokens of its texts, so only the first token of "
                "each sampled text was compared, which drafts do not affect"
            )
        first = settings.seed * settings.samples
        requests = [
            (self.prompts[index], {**fields, "seed": seed})
            for seed in range(first, first + settings.samples)
        ]
        answers = self._ask(f"samples of prompt {index + 1}", requests)
        # Without log-probabilities, which must not change the texts.
        again = [
            (prompt, {**options, "log_probs": False})
            for prompt, options in requests[:_REPEATED_SEEDS]
        ]
        repeated = self._ask("repeated seeds", again)
        same = sum(one.text == other.text for one, other in zip(answers, repeated, strict=False))
        self._add(SeedCheck(texts=len(repeated), same=same, drafted=drafted_in(repeated)))
        num_sampled = min(settings.sampled_prompts, len(self.prompts))
        checks = check_samples(
            self.model,
            self.tokenizer,
            self.encoded[index],
            answers,
            settings,
            index + 1,
            FALSE_ALARM / (DISTRIBUTION_TESTS * num_sampled),
        )
        for check in checks:
            self._add(check)

    def _ask(
        self, what: str, requests: Sequence[tuple[ServerPrompt, dict[str, Any]]]
    ) -> list[ServerAnswer]:
        advance = self.track(what, len(requests))
        answers = []
        with ThreadPoolExecutor(8) as pool:
            for answer in pool.map(lambda each: self.client.ask(each[0], **each[1]), requests):
                answers.append(answer)
                advance()
        self.fingerprints |= {one.system_fingerprint for one in answers if one.system_fingerprint}
        return answers

    def _add(self, check: ServerCheck) -> None:
        self.checks.append(check)
        self.on_check(check)


def drafted_in(answers: Sequence[ServerAnswer]) -> int | None:
    """Return the number of accepted drafts in answers; None if the server does not report it."""
    counts = [answer.accepted for answer in answers if answer.accepted is not None]
    return sum(counts) if counts else None


class TextComparison:
    """One text of the server beside the target's own greedy tokens.

    The tokens count as equal as long as the server's text begins with their text. At the first
    difference, the server's token is assumed to be the likeliest one that agrees with its text.
    """

    def __init__(
        self,
        reference: Reference,
        tokenizer: PreTrainedTokenizerBase,
        answer: ServerAnswer,
        max_new_tokens: int,
    ) -> None:
        self._reference, self._tokenizer = reference, tokenizer
        self._expected = reference.greedy(max_new_tokens)
        is_ended = bool(self._expected) and reference.ends(self._expected[-1])
        self._content = self._expected[:-1] if is_ended else self._expected
        self._own = self._text(self._content)
        self._text_ends = answer.finish_reason == "stop"
        # Some tokenizers drop a space at the beginning of a text, and some servers keep it.
        keeps = answer.text.startswith(" ") and not self._own.startswith(" ")
        self._got = answer.text[1:] if keeps else answer.text
        self.is_equal = (self._own, is_ended) == (self._got, self._text_ends)
        sizes = range(len(self._content), 0, -1)
        common = next((size for size in sizes if self._agrees(self._content[:size])), 0)
        self.num_equal = len(self._expected) if self.is_equal else common

    def difference(self, number: int) -> TextDifference:
        """Return the first difference; `number` is that of the prompt, from 1."""
        prefix = self._content[: self.num_equal]
        before = len(self._text(prefix).rstrip(REPLACEMENT))
        target = self._expected[len(prefix)] if len(prefix) < len(self._expected) else None
        scores = self._reference.greedy_scores(prefix)
        server = self._server_token(prefix, scores, before, target)
        gap, rounded = None, 0.0
        if target is not None and server is not None:
            pair = [float(scores[target]), float(scores[server])]
            gap, rounded = abs(pair[0] - pair[1]), rounding(self._reference.model.dtype, pair)
        return TextDifference(
            prompt=number,
            position=len(prefix) + 1,
            target_token=target,
            server_token=server,
            target_text=self._own[before : before + _SHOWN],
            server_text=self._got[before : before + _SHOWN],
            gap=gap,
            rounding=rounded,
        )

    def _agrees(self, token_ids: Tokens) -> bool:
        """Return whether the server's text can begin with the text of tokens."""
        text = self._text(token_ids)
        complete = text.rstrip(REPLACEMENT)
        if not self._got.startswith(complete):
            return False
        # The tokens may end in the middle of a character, which is not one of ASCII.
        following = self._got[len(complete) : len(complete) + 1]
        return text == complete or (following != "" and not following.isascii())

    def _server_token(
        self, prefix: Tokens, scores: Tensor, before: int, target: int | None
    ) -> int | None:
        """Return the likeliest token that continues a prefix to the server's text."""
        best = scores.topk(min(_MOST_CANDIDATES, len(scores))).indices.tolist()
        if len(self._got) == before and self._text_ends:
            return next((token for token in best if self._reference.ends(token)), None)
        for token in best:
            has_text = self._text((*prefix, token)) != self._text(prefix)
            if has_text and token != target and self._agrees((*prefix, token)):
                return int(token)
        return None

    def _text(self, token_ids: Tokens) -> str:
        return text_of_tokens(self._tokenizer, token_ids)


class TokenNames:
    """Groups of tokens that have the same name in a server's answers.

    Most tokens are alone in their group. Each group is represented by one of its tokens, and all
    tokens that end a text form a group.

    Args:
        special: whether special tokens have names; if not, their text is empty.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_ids: Collection[int],
        *,
        special: bool,
    ) -> None:
        known = min(len(tokenizer), vocab_size)
        texts = tokenizer.batch_decode(
            [[token] for token in range(known)], skip_special_tokens=not special
        )
        end = min(eos_ids, default=-1)  # stands for all tokens that end a text
        self.end = end if eos_ids else None
        self.representatives = torch.arange(vocab_size)
        # The ends of texts come first, so that other tokens with the same name join them.
        self._ids = {texts[token]: end for token in eos_ids if token < known}
        for token in range(vocab_size):
            name = texts[token] if token < known else ""
            own = end if token in eos_ids else self._ids.setdefault(name, token)
            self.representatives[token] = own
        counts = self.representatives.bincount().tolist()
        # Groups of several tokens, except the ends of texts.
        self.shared = {token for token, count in enumerate(counts) if count > 1} - {end}

    def tokens_of(self, answer: ServerAnswer, *, has_names: bool) -> Tokens:
        """Return the representatives of an answer's tokens, up to the first ambiguous one."""
        is_stopped = answer.finish_reason == "stop" and self.end is not None
        names = answer.tokens if has_names else (answer.text,)
        if not has_names and is_stopped and not answer.text:
            names = ()
        tokens: list[int] = []
        for name in names:
            if name not in self._ids:
                raise ResourceError(
                    "the server's tokens are not those of the target",
                    expected="texts of single tokens, as the target's tokenizer decodes them",
                    got=repr(name[:80]),
                    remedy="check that --target is the model that the server serves",
                )
            tokens.append(self._ids[name])
            if tokens[-1] in self.shared or tokens[-1] == self.end:
                return tuple(tokens)
        # Some servers do not name the token that ends a text.
        if is_stopped and self.end is not None and (has_names or not tokens):
            tokens.append(self.end)
        return tuple(tokens)


class NamedReference(Reference):
    """A target's distributions over groups of tokens with the same name.

    The probability of a group is that of its representative, and the other tokens have probability
    zero. A group of several tokens ends a continuation, because it is not known which of them the
    server has chosen.
    """

    def __init__(
        self,
        model: CausalLM,
        prompt_ids: Sequence[int],
        sampling: dict[str, Any],
        names: TokenNames,
    ) -> None:
        super().__init__(model, prompt_ids, sampling)
        self._names = names

    def distributions(
        self, prefixes: Sequence[Tokens]
    ) -> Iterator[tuple[Tokens, Float[Tensor, " vocab"]]]:
        """Yield each prefix, and the distribution of the group of the next token."""
        for prefix, probs in super().distributions(prefixes):
            groups = self._names.representatives.to(probs.device)
            yield prefix, torch.zeros_like(probs).index_add_(0, groups, probs)

    def ends(self, token: int) -> bool:
        """Return whether a continuation has no known token after this one."""
        return token in self._names.shared or super().ends(token)


def check_samples(
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[int],
    answers: Sequence[ServerAnswer],
    settings: ServerVerifySettings,
    number: int,
    threshold: float,
) -> tuple[DistributionCheck | SupportCheck, ...]:
    """Compare sampled texts with the target's own distribution.

    If the server does not name the tokens of each text, the texts must consist of a single token.
    """
    has_names = any(answer.tokens for answer in answers)
    eos_ids = set(end_ids(model.generation_config))
    config: Any = model.config
    vocab_size = int(config.get_text_config().vocab_size)
    names = TokenNames(tokenizer, vocab_size, eos_ids, special=has_names)
    sequence_check, rank_check, support_check = compare_samples(
        NamedReference(model, prompt_ids, settings.sampling, names),
        [names.tokens_of(answer, has_names=has_names) for answer in answers],
        length=(settings.sample_length or _SAMPLE_LENGTH) if has_names else 1,
        drafted=drafted_in(answers),
        number=number,
        threshold=threshold,
        seed=settings.seed,
    )
    if not has_names:  # ranks are those of tokens after the first
        return (sequence_check, support_check)
    return (sequence_check, rank_check, support_check)
