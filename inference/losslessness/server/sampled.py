"""Sampled texts of a server, and the tokens that they consist of."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from inference.client.answer import ServerAnswer
from inference.client.client import ServerClient
from inference.client.patience import ask_patiently
from inference.client.request import ServerRequest
from inference.losslessness.records import DistributionCheck, SupportCheck
from inference.losslessness.reference import Reference, Tokens
from inference.losslessness.sampled import compare_samples
from inference.losslessness.server.greedy import drafted_in
from inference.losslessness.server.records import SeedCheck, ServerVerifySettings
from jakiro.errors import ResourceError
from jakiro.target.checks import CausalLM
from jakiro.utils.pretrained import end_ids

REPEATED_SEEDS = 20  # number of samples that are requested twice


class TokenNames:
    """Groups of tokens that have the same name in a server's answers.

    Most tokens are alone in their group. Each group is represented by one of its tokens, and all
    tokens that end a text form a group.

    Args:
        tokenizer: the target's tokenizer.
        vocab_size: number of tokens in the target's vocabulary.
        eos_ids: tokens that end a text.
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

    def token_of(self, name: str) -> int | None:
        """Return the representative of the tokens with a name; None for an unknown name."""
        return self._ids.get(name)


class NamedReference(Reference):
    """A target's distributions over groups of tokens with the same name.

    The probability of a group is that of its representative, and the other tokens have probability
    zero. A group of several tokens ends a continuation, because it is not known which of them the
    server has chosen.

    Args:
        model: the target.
        prompt_ids: token ids of the prompt.
        sampling: arguments of `generate()` that process the distribution.
        names: groups of tokens.
    """

    def __init__(
        self,
        model: CausalLM,
        prompt_ids: Sequence[int],
        sampling: dict[str, Any],
        names: TokenNames,
    ) -> None:
        super().__init__(model, prompt_ids, sampling)
        self.names = names
        self._shared = names.shared

    def distributions(
        self, prefixes: Sequence[Tokens]
    ) -> Iterator[tuple[Tokens, Float[Tensor, " vocab"]]]:
        """Yield each prefix, and the distribution of the group of the next token."""
        for prefix, probs in super().distributions(prefixes):
            groups = self.names.representatives.to(probs.device)
            yield prefix, torch.zeros_like(probs).index_add_(0, groups, probs)

    def ends(self, token: int) -> bool:
        """Return whether a continuation has no known token after this one."""
        return token in self._shared or super().ends(token)


async def ask_all(
    client: ServerClient,
    requests: Sequence[ServerRequest],
    concurrency: int,
    advance: Callable[[], None],
) -> list[ServerAnswer]:
    """Return the answers to requests, several of which are sent at the same time.

    Args:
        client: client of the server.
        requests: requests to send.
        concurrency: largest number of requests at the same time.
        advance: function that is called after each answer.

    Raises:
        ResourceError: an answer is not complete.
    """
    gate, source = asyncio.Semaphore(concurrency), Random(0)

    async def ask(request: ServerRequest) -> ServerAnswer:
        async with gate:
            answer = await ask_patiently(client, request, source)
        advance()
        return answer

    answers = await asyncio.gather(*map(ask, requests))
    for answer in answers:
        if answer.error is not None:
            raise refused(client, answer)
    return answers


def refused(client: ServerClient, answer: ServerAnswer) -> ResourceError:
    """Return the error for an answer that is not complete.

    Args:
        client: client of the server.
        answer: the answer.
    """
    return ResourceError(
        f"the server at {client.url} does not answer a request of the verification",
        expected="a complete answer with status 200",
        got=f"status {answer.status or 'missing'}: {answer.error}",
        remedy="check the options, and the log of the server",
    )


async def check_seeds(
    client: ServerClient,
    requests: Sequence[ServerRequest],
    answers: Sequence[ServerAnswer],
    concurrency: int,
) -> SeedCheck:
    """Request some texts again, without log-probabilities, and compare them.

    This also shows that log-probabilities, from which the tokens of samples are known, do not
    change the texts.

    Args:
        client: client of the server.
        requests: requests with seeds.
        answers: answer to each of them.
        concurrency: largest number of requests at the same time.
    """
    again = [replace(request, has_log_probs=False) for request in requests[:REPEATED_SEEDS]]
    repeated = await ask_all(client, again, concurrency, lambda: None)
    first = answers[: len(again)]
    same = [a.text == b.text for a, b in zip(first, repeated, strict=True)]
    return SeedCheck(texts=len(same), same=sum(same), drafted=drafted_in(repeated))


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

    If the server names the tokens of each text, whole texts are compared. If it does not, the texts
    must consist of a single token.

    Args:
        model: the target.
        tokenizer: the target's tokenizer.
        prompt_ids: token ids of the prompt.
        answers: complete answers.
        settings: settings of the verification.
        number: number of the prompt in the report, from 1.
        threshold: smallest p-value that passes.
    """
    has_names = names_tokens(answers)
    eos_ids = set(end_ids(model.generation_config))
    names = TokenNames(tokenizer, _vocab_size(model), eos_ids, special=has_names)
    read = _named_tokens if has_names else _only_token
    sequences = [read(answer, names) for answer in answers]
    reference = NamedReference(model, prompt_ids, settings.sampling, names)
    sequence_check, rank_check, support_check = compare_samples(
        reference,
        sequences,
        length=settings.length if has_names else 1,
        drafted=drafted_in(answers),
        number=number,
        threshold=threshold,
        seed=settings.seed,
    )
    if not has_names:  # ranks are those of tokens after the first
        return (sequence_check, support_check)
    return (sequence_check, rank_check, support_check)


def names_tokens(answers: Sequence[ServerAnswer]) -> bool:
    """Return whether the server names the tokens of every answer."""
    is_named = [bool(answer.tokens) for answer in answers]
    # Some servers do not name the token that ends a text.
    ended = [answer.finish_reason == "stop" for answer in answers]
    return any(is_named) and all(a or b for a, b in zip(is_named, ended, strict=True))


def _named_tokens(answer: ServerAnswer, names: TokenNames) -> Tokens:
    """Return the tokens of an answer up to the first one that is not known exactly."""
    tokens: list[int] = []
    for name in answer.tokens:
        token = names.token_of(name)
        if token is None:
            raise _unknown(name)
        tokens.append(token)
        if token in names.shared or token == names.end:
            return tuple(tokens)
    if answer.finish_reason == "stop" and names.end is not None:
        tokens.append(names.end)  # some servers do not name the token that ends a text
    return tuple(tokens)


def _only_token(answer: ServerAnswer, names: TokenNames) -> Tokens:
    if answer.finish_reason == "stop" and not answer.text and names.end is not None:
        return (names.end,)
    token = names.token_of(answer.text)
    if token is None:
        raise _unknown(answer.text)
    return (token,)


def _unknown(name: str) -> ResourceError:
    return ResourceError(
        "the server's tokens are not those of the target",
        expected="texts of single tokens, as the target's tokenizer decodes them",
        got=repr(name[:80]),
        remedy="check that --target is the model that the server serves",
    )


def _vocab_size(model: CausalLM) -> int:
    config: Any = model.config
    return int(config.get_text_config().vocab_size)
