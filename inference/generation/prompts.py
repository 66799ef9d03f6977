"""Token ids of texts, chat messages, and padded batches."""

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

import torch
from jaxtyping import Int
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jakiro.errors import PromptError

Prompt = str | list[dict[str, Any]] | list[int] | Tensor

# Errors that chat templates raise on purpose, and errors caused by messages of an unexpected form.
TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    NameError,
    RecursionError,
    TypeError,
    ValueError,
)


def encode_prompt(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Return the token ids of a text, a list of chat messages, or token ids.

    Args:
        prompt: a single prompt; token ids may have shape [tokens] or [1, tokens].
        tools: tools that the answer to chat messages may call, as chat templates expect them.

    Raises:
        PromptError: the prompt is empty, contains several prompts or ids outside the target's
            vocabulary, needs a tokenizer or chat template that is missing, or is rejected by the
            chat template; or the template has no tools.
    """
    if isinstance(prompt, Tensor):
        ids = _single(prompt)
    elif isinstance(prompt, str):
        _check_characters(prompt)
        ids = list(needed(tokenizer)(prompt)["input_ids"])
    elif isinstance(prompt, Mapping) or not isinstance(prompt, Iterable):
        raise _unusable(f"a {type(prompt).__name__}")
    elif prompt and isinstance(prompt[0], dict):
        ids = _templated(prompt, needed(tokenizer), tools)
    else:
        ids = list(prompt)  # type: ignore[arg-type]
    if not ids:
        raise PromptError(
            "the prompt is empty",
            got=repr(prompt),
            remedy="pass a prompt with text, or the id of a token that begins texts",
        )
    try:
        ids = [index(token) for token in ids]
    except TypeError as error:
        raise _unusable(f"a list of {type(ids[0]).__name__}") from error
    check_ids(ids, vocab_size)
    return ids


def continued_tokens(
    prompt: str | Sequence[object] | Tensor, token_ids: Sequence[int]
) -> Sequence[int]:
    """Return the tokens that new text continues; none if it answers chat messages."""
    is_chat = isinstance(prompt, list) and not hasattr(prompt[0], "__index__")
    return () if is_chat else token_ids


def _unusable(got: str) -> PromptError:
    return PromptError(
        "the prompt cannot be used",
        expected="a text, a list of chat messages, or token ids as a list or tensor",
        got=got,
        remedy="use generate_batch for several prompts",
    )


def single_prompt(prompt: Prompt | Mapping[str, Any] | None, arguments: dict[str, Any]) -> Prompt:
    """Return a prompt that may be what a tokenizer returned, as a mapping or as arguments.

    Args:
        prompt: a prompt, or a mapping with `input_ids` and, for padding, `attention_mask`; None if
            these are among the arguments, from which they are then removed.
    """
    if prompt is not None and not isinstance(prompt, Mapping):
        return prompt
    inputs = prompt
    if inputs is None:
        names = arguments.keys() & {"input_ids", "attention_mask"}
        inputs = {name: arguments.pop(name) for name in names}
    if "input_ids" not in inputs:
        raise _unusable("no prompt" if prompt is None else f"a {type(prompt).__name__}")
    ids = torch.tensor([_single(torch.as_tensor(inputs["input_ids"]))])
    mask = inputs.get("attention_mask")
    (single,) = unpadded(ids, None if mask is None else torch.as_tensor(mask).reshape(1, -1))
    return single


def refuse_single(prompts: object) -> None:
    """Raise an error if a single prompt was passed where several prompts are expected."""
    first = prompts[0] if isinstance(prompts, list) and prompts else None
    if isinstance(prompts, str) or isinstance(first, int | dict):
        raise PromptError(
            "a list of prompts is needed, but this is a single prompt",
            remedy="use generate(), or pass [prompt]",
        )


def _check_characters(text: str) -> None:
    """Raise an error if a text contains half of a surrogate pair, which is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            "the prompt contains an invalid character", got=ascii(text[error.start])
        ) from error


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise PromptError(
            "the prompt contains ids outside the target's vocabulary",
            expected=f"ids from 0 to {vocab_size - 1}",
            got=wrong[0],
        )


def unpadded(
    input_ids: Int[Tensor, "batch width"], attention_mask: Int[Tensor, "batch width"] | None
) -> list[list[int]]:
    """Return the sequences of a batch without the padding on either side."""
    sequences = input_ids.tolist()
    if attention_mask is None:
        return [list(ids) for ids in sequences]
    if attention_mask.shape != input_ids.shape:
        raise PromptError("the attention mask does not have the shape of the prompts")
    return [
        _without_padding(ids, mask, index)
        for index, (ids, mask) in enumerate(zip(sequences, attention_mask.tolist(), strict=True))
    ]


def needed(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise PromptError(
            "the decoder has no tokenizer for texts, messages, stop strings and streamed text",
            remedy="pass tokenizer= to SpeculativeDecoder",
        )
    return tokenizer


def _single(prompt: Tensor) -> list[int]:
    batch = prompt.reshape(1, -1) if prompt.dim() < 2 else prompt
    if batch.shape[0] != 1 or batch.is_floating_point():
        raise PromptError(
            "this method decodes one prompt at a time, integer ids of shape [1, tokens]",
            got=f"{batch.dtype} of shape {list(batch.shape)}",
            remedy="use generate_batch for several prompts",
        )
    ids: list[int] = batch[0].tolist()
    return ids


def _without_padding(ids: list[int], mask: Sequence[int], index: int) -> list[int]:
    seen = [position for position, is_seen in enumerate(mask) if is_seen]
    if not seen or seen[-1] - seen[0] + 1 != len(seen):
        raise PromptError(f"the attention mask of prompt {index} is not that of padding")
    return ids[seen[0] : seen[-1] + 1]


def _templated(
    messages: list[dict[str, Any]] | list[int],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]],
) -> list[int]:
    if tokenizer.chat_template is None:
        raise PromptError(
            "the tokenizer has no chat template",
            remedy="set tokenizer.chat_template, or pass the prompt as a text",
        )
    if tools and "tools" not in tokenizer.get_chat_template(tools=[*map(dict, tools)]):
        raise PromptError(
            "the target's chat template has no tools", remedy="leave them out, or describe them"
        )
    try:
        apply: Any = tokenizer.apply_chat_template
        given = {"tools": list(tools)} if tools else {}
        encoded = apply(messages, add_generation_prompt=True, return_dict=True, **given)
    except TEMPLATE_ERRORS as error:
        raise PromptError(
            "the chat template rejects the messages",
            got=error,
            remedy="many templates require alternating roles, and some have no system prompt",
        ) from error
    return list(encoded["input_ids"])
