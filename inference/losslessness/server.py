"""`jakiro verify --url`: checks that a running server's greedy texts are those of its target.

Servers with OpenAI's interface return texts, not token ids, so texts are compared with the text of
the target's own tokens.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.client import ServerAnswer, ServerClient
from inference.generation.prompts import Prompt, encode_prompt
from inference.losslessness.records import Check, Difference, VerifySettings, count_differences
from inference.losslessness.reference import Reference
from jakiro.utils.progress import Track, untracked
from jakiro.utils.token_text import REPLACEMENT, text_of_tokens
from jakiro.utils.wording import counted

_REQUESTS = 8  # at the same time
_MOST_CANDIDATES = 200  # likeliest tokens among which the server's token is searched
_SHOWN = 40  # characters of a text


def verify_server(
    client: ServerClient,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: VerifySettings,
    track: Track = untracked,
) -> Check:
    """Compare a server's greedy texts with those of its target."""
    sent: Sequence[Any] = prompts[: settings.num_prompts]
    most = settings.max_new_tokens
    config: Any = model.config
    vocab_size = config.get_text_config().vocab_size
    ask = partial(client.ask, max_tokens=most, temperature=0.0)
    advance = track("greedy texts", len(sent))
    tokens = drafted = other_lengths = 0
    differences = []
    with ThreadPoolExecutor(_REQUESTS) as pool:
        for number, answer in enumerate(pool.map(ask, sent), start=1):
            ids = encode_prompt(sent[number - 1], tokenizer, vocab_size)
            other_lengths += answer.prompt_tokens not in (None, len(ids))
            equal, difference = compare_text(Reference(model, ids), tokenizer, answer, most, number)
            tokens += equal
            drafted += answer.accepted or 0
            differences += [] if difference is None else [difference]
            advance()
    line = (
        f"{counted(len(sent), 'prompt')}, {tokens} tokens equal, "
        f"{counted(drafted, 'accepted draft')}; {count_differences(differences)}"
    )
    if other_lengths:
        line += (
            f"; {counted(other_lengths, 'prompt')} of another length on the server, whose "
            "tokenizer or chat template may differ"
        )
    return Check(
        name="greedy texts",
        passed=all(one.is_near_tie for one in differences),
        drafted=drafted,
        differences=tuple(differences),
        line=line,
        prompts=len(sent),
        tokens=tokens,
    )


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
