"""The command `jakiro generate`."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jakiro.cli import options
from jakiro.cli.decoding import DecoderSettings, SamplingSettings
from jakiro.cli.output import UNSAFE, say
from jakiro.errors import PromptError
from jakiro.utils.logs import quiet_libraries

if TYPE_CHECKING:
    from inference import SpeculativeDecoder

_STANDARD_INPUT = "-"
_LONG = 4000  # number of characters from which a prompt may take seconds to read


@options.with_options
@quiet_libraries()
def generate(
    *,
    drafter: options.DrafterName,
    prompt: Annotated[
        str, typer.Argument(help="Question to answer or text to continue; - for standard input.")
    ],
    target: options.TargetOfDrafter = None,
    raw: options.Raw = False,
    system: options.System = None,
    stats: options.Stats = False,
    sampling: SamplingSettings,
    settings: DecoderSettings,
) -> None:
    """Answer a question or continue a text as the target would, but faster.

    Greedy text is exactly the target's in float32, and in half precision up to rounding.
    """
    text = prompt_text(prompt)
    from inference.generation.streaming import TextPrinter

    decoder = settings.load(drafter, target)
    is_chat = _is_chat(decoder, raw, system)
    if len(text) > _LONG and decoder.tokenizer is not None:
        say(f"reading a prompt of {len(decoder.tokenizer(text).input_ids)} tokens")
    output = decoder.generate(
        messages(text, system) if is_chat else text,
        streamer=TextPrinter(decoder.tokenizer, _write),
        **sampling.given,
    )
    typer.echo()
    if not (output.text or "").strip() and len(output.new_token_ids) < sampling.max_new_tokens:
        say(f"the model ended the text at once; remedy: {_remedy(is_chat, raw)}")
    if stats:
        say(output.stats.summary)


def _write(text: str) -> None:
    """Write a piece of text, to a terminal without control characters."""
    typer.echo(text.translate(UNSAFE) if sys.stdout.isatty() else text, nl=False)


def prompt_text(prompt: str) -> str:
    """Return the prompt, which is not empty; from standard input, without its last newline."""
    text = prompt
    if prompt == _STANDARD_INPUT:
        try:
            text = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise PromptError("standard input is not text in UTF-8", got=error) from error
    if not text.strip():
        raise PromptError("the prompt is empty", expected="a question or a text", got=repr(text))
    return text


def _is_chat(decoder: "SpeculativeDecoder", raw: bool, system: str | None) -> bool:
    """Print and return whether the prompt is sent as a chat message."""
    has_template = decoder.tokenizer is not None and decoder.tokenizer.chat_template is not None
    is_chat = has_template and not raw
    if system is not None and not is_chat:
        raise PromptError(
            "--system can only be used with the chat template of the target",
            got="--raw" if raw else "a tokenizer without a chat template",
        )
    if is_chat:
        say("answering with the target's chat template; --raw continues the prompt as plain text")
    else:
        reason = "--raw" if raw else "the target has no chat template"
        say(f"continuing the prompt as plain text ({reason})")
    return is_chat


def messages(text: str, system: str | None) -> list[dict[str, Any]]:
    """Return the messages of a chat that begins with a question."""
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": text}]


def _remedy(is_chat: bool, raw: bool) -> str:
    if is_chat:
        return "ask in other words, sample with --temperature 0.7, or try --raw"
    return "leave out --raw" if raw else "use a longer prompt, or sample with --temperature 0.7"
