"""`jakiro verify --url`: checks that a running server's texts are those of its target.

Servers with OpenAI's interface return texts, not token ids. Greedy texts are compared with the text
of the target's own tokens. Sampled texts are compared token by token, by the names that the server
gives with log-probabilities.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.client import ServerAnswer, ServerClient, ServerPrompt
from inference.generation.prompts import Prompt, encode_prompt
from inference.losslessness.records import (
    Check,
    Difference,
    Report,
    VerifySettings,
    collect,
    count_differences,
)
from inference.losslessness.reference import Reference, Tokens
from inference.losslessness.sampled import compare_samples
from jakiro.errors import ResourceError
from jakiro.utils.pretrained import end_ids
from jakiro.utils.progress import Track, untracked
from jakiro.utils.token_text import REPLACEMENT, text_of_tokens
from jakiro.utils.wording import counted, dtype_name

_SAMPLE_LENGTH = 6  # number of tokens of a sampled text; longer texts rarely have a cell
_REPEATED_SEEDS = 20  # number of samples that are requested twice
_MOST_CANDIDATES = 200  # likeliest tokens among which the server's token is searched
_SHOWN = 40  # characters of a text

Request = tuple[ServerPrompt, dict[str, Any]]


def verify_server(
    client: ServerClient,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: VerifySettings,
    *,
    chat: bool = False,
    on_check: Callable[[Check], None] = lambda _: None,
    track: Track = untracked,
) -> Report:
    """Return a report on whether a server's greedy and sampled texts are those of its target.

    Args:
        chat: whether a text is sent as the message of a user.
    """
    if not client.is_own:  # other servers do not have the defaults of transformers
        explicit = {"top_p": settings.top_p or 1.0, "top_k": settings.top_k or 0}
        settings = settings.model_copy(update=explicit)
    sent: list[Any] = [
        [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt
        for prompt in prompts[: settings.num_prompts]
    ]
    settings = settings.for_prompts(len(sent))
    verification = _Verification(client, model, tokenizer, sent, settings, track)
    checks = collect(verification.checks(), on_check)
    if all(check.drafted is None for check in checks):
        verification.notes.append(
            "the server does not report how many drafts were accepted, so it is not known whether "
            "the checks concern drafts"
        )
    return Report(
        target=model.name_or_path,
        dtype=dtype_name(model.dtype),
        url=client.url,
        model=client.model,
        chat=chat,
        system_fingerprints=tuple(sorted(verification.fingerprints)),
        settings=settings,
        checks=checks,
        notes=tuple(dict.fromkeys(verification.notes)),
    )


@dataclass
class _Verification:
    """The checks of one server; the arguments are those of `verify_server`."""

    client: ServerClient
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Any]
    settings: VerifySettings
    track: Track
    notes: list[str] = field(default_factory=list)
    fingerprints: set[str] = field(default_factory=set)

    def encode(self, index: int) -> list[int]:
        config: Any = self.model.config
        vocab_size = config.get_text_config().vocab_size
        return encode_prompt(self.prompts[index], self.tokenizer, vocab_size)

    def checks(self) -> Iterator[Check]:
        yield self._check_greedy()
        for index in range(min(self.settings.sampled_prompts, len(self.prompts))):
            yield from self._check_samples(index)

    def _check_greedy(self) -> Check:
        most = self.settings.max_new_tokens
        fields = {"max_tokens": most, "temperature": 0.0}
        answers = self._ask("greedy texts", [(prompt, fields) for prompt in self.prompts])
        tokens, differences = 0, []
        for number, answer in enumerate(answers, start=1):
            ids = self.encode(number - 1)
            if answer.prompt_tokens not in (None, len(ids)):
                self.notes.append(
                    f"prompt {number} has {len(ids)} tokens here, but the server counts "
                    f"{answer.prompt_tokens}: its tokenizer or chat template may be another one"
                )
            reference = Reference(self.model, ids)
            equal, difference = compare_text(reference, self.tokenizer, answer, most, number)
            tokens += equal
            differences += [] if difference is None else [difference]
        return Check(
            name="greedy texts",
            passed=all(one.is_near_tie for one in differences),
            drafted=drafted_in(answers),
            differences=tuple(differences),
            line=f"{counted(len(answers), 'prompt')}, {tokens} tokens equal; "
            f"{count_differences(differences)}",
            prompts=len(answers),
            tokens=tokens,
        )

    def _check_samples(self, index: int) -> Iterator[Check]:
        settings, prompt = self.settings, self.prompts[index]
        fields: dict[str, Any] = {
            "max_tokens": settings.sample_length or _SAMPLE_LENGTH,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            # Other servers may not have this field, and need not have it without a limit.
            "top_k": settings.top_k if self.client.is_own else settings.top_k or None,
            "log_probs": True,
        }
        first = settings.seed * settings.samples
        requests: list[Request] = [
            (prompt, {**fields, "seed": first + number}) for number in range(settings.samples)
        ]
        begun = requests[:_REPEATED_SEEDS]
        answers = self._ask(f"first samples of prompt {index + 1}", begun)
        # Without log-probabilities, which must not change the texts.
        without = [(prompt, {**options, "log_probs": False}) for _, options in begun]
        repeated = self._ask("repeated seeds", without)
        same = sum(one.text == other.text for one, other in zip(answers, repeated, strict=True))
        yield Check(
            name="seeds",
            passed=same == len(repeated),
            drafted=drafted_in(repeated),
            line=f"{same} of {len(repeated)} texts are the same if they are requested again",
            texts=len(repeated),
            same=same,
        )
        if not any(answer.tokens for answer in answers):
            self.notes.append(
                "the server does not name the tokens of its texts, so sampled texts cannot be "
                "compared with the target's distribution"
            )
            return
        answers += self._ask(f"samples of prompt {index + 1}", requests[_REPEATED_SEEDS:])
        ids = self.encode(index)
        reference = NamedReference(self.model, ids, settings.sampling, self.tokenizer)
        sequences = [reference.tokens_of(answer) for answer in answers]
        drafted, length = drafted_in(answers), fields["max_tokens"]
        yield from compare_samples(reference, sequences, length, drafted, index + 1, settings)

    def _ask(self, what: str, requests: Sequence[Request]) -> list[ServerAnswer]:
        advance = self.track(what, len(requests))
        answers = []

        def ask(request: Request) -> ServerAnswer:
            prompt, options = request
            return self.client.ask(prompt, **options)

        with ThreadPoolExecutor(8) as pool:
            for answer in pool.map(ask, requests):
                answers.append(answer)
                advance()
        self.fingerprints |= {one.system_fingerprint for one in answers if one.system_fingerprint}
        return answers


def drafted_in(answers: Sequence[ServerAnswer]) -> int | None:
    """Return the number of accepted drafts in answers; None if the server does not report it."""
    counts = [answer.accepted for answer in answers if answer.accepted is not None]
    return sum(counts) if counts else None


def compare_text(
    reference: Reference,
    tokenizer: PreTrainedTokenizerBase,
    answer: ServerAnswer,
    max_new_tokens: int,
    number: int,
) -> tuple[int, Difference | None]:
    """Compare a text of the server with the target's own greedy tokens.

    The tokens count as equal as long as the server's text begins with their text. At the first
    difference, the server's token is assumed to be the likeliest one that agrees with its text.

    Args:
        number: number of the prompt, from 1.

    Returns:
        The number of equal tokens, and the first difference.
    """
    text_of = partial(text_of_tokens, tokenizer)
    expected = reference.greedy(max_new_tokens)
    is_ended = bool(expected) and reference.ends(expected[-1])
    content = expected[:-1] if is_ended else expected
    text, is_stopped = text_of(content), answer.finish_reason == "stop"
    # Some tokenizers drop a space at the beginning of a text, and some servers keep it.
    got = answer.text if text.startswith(" ") else answer.text.removeprefix(" ")
    if (text, is_ended) == (got, is_stopped):
        return len(expected), None
    sizes = range(len(content), 0, -1)
    equal = next((size for size in sizes if _can_begin(got, text_of(content[:size]))), 0)
    prefix = content[:equal]
    target = expected[equal] if equal < len(expected) else None
    before = text_of(prefix)
    begin = len(before.rstrip(REPLACEMENT))

    def agrees(token: int) -> bool:
        if is_stopped and len(got) == begin:
            return reference.ends(token)
        longer = text_of((*prefix, token))
        return token != target and longer != before and _can_begin(got, longer)

    scores = reference.greedy_scores(prefix)
    best = scores.topk(min(_MOST_CANDIDATES, len(scores))).indices.tolist()
    served = next(filter(agrees, best), None)
    gap, rounding = reference.gap(prefix, target, served)
    return equal, Difference(
        prompt=number,
        position=equal + 1,
        target_token=target,
        decoder_token=served,
        gap=gap,
        rounding=rounding,
        target_text=text[begin : begin + _SHOWN],
        server_text=got[begin : begin + _SHOWN],
    )


def _can_begin(whole: str, text: str) -> bool:
    """Return whether a text can begin with the text of tokens.

    The tokens may end in the middle of a character, which is not one of ASCII.
    """
    complete = text.rstrip(REPLACEMENT)
    if not whole.startswith(complete):
        return False
    following = whole[len(complete) : len(complete) + 1]
    return text == complete or (following != "" and not following.isascii())


class NamedReference(Reference):
    """A target's distributions over the names that a server gives to tokens.

    Tokens with the same name form a group, and so do all tokens that end a text. The probability of
    a group is that of its first token, and the others have probability zero. A group of several
    tokens, unless they end the text, ends a continuation: it is not known which of them the server
    has chosen.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt_ids: Sequence[int],
        sampling: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        super().__init__(model, prompt_ids, sampling)
        size = int(model.config.get_text_config().vocab_size)
        names = tokenizer.batch_decode([[token] for token in range(min(len(tokenizer), size))])
        names += [""] * (size - len(names))
        ends = set(end_ids(model.generation_config))
        self.end = min(ends, default=None)
        # The ends of texts come first, so that other tokens with the same name join them.
        self._ids = {names[token]: min(ends) for token in ends if token < size}
        groups = [
            min(ends) if token in ends else self._ids.setdefault(name, token)
            for token, name in enumerate(names)
        ]
        self.groups = torch.tensor(groups, device=model.device)
        counts = Counter(groups)
        self.shared = {token for token, count in counts.items() if count > 1} - {self.end}

    def tokens_of(self, answer: ServerAnswer) -> Tokens:
        """Return the groups of an answer's tokens, up to the first ambiguous one."""
        tokens: list[int] = []
        for name in answer.tokens:
            if name not in self._ids:
                raise ResourceError(
                    "the server's tokens are not those of the target",
                    got=repr(name[:80]),
                    remedy="check that --target is the model that the server serves",
                )
            tokens.append(self._ids[name])
            if tokens[-1] in self.shared or tokens[-1] == self.end:
                return tuple(tokens)
        # Some servers do not name the token that ends a text.
        if answer.finish_reason == "stop" and self.end is not None:
            tokens.append(self.end)
        return tuple(tokens)

    def distributions(
        self, prefixes: Sequence[Tokens]
    ) -> Iterator[tuple[Tokens, Float[Tensor, " vocab"]]]:
        """Yield each prefix, and the distribution of the group of the next token."""
        for prefix, probs in super().distributions(prefixes):
            yield prefix, torch.zeros_like(probs).index_add_(0, self.groups, probs)

    def ends(self, token: int) -> bool:
        """Return whether a continuation has no known token after this one."""
        return token in self.shared or super().ends(token)
