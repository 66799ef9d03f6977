"""The command `jakiro generate`."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inference.drafters.names import refuse_missing_parts
from jakiro.cli import options
from jakiro.cli.output import UNSAFE, say
from jakiro.errors import PromptError
from jakiro.utils.logs import quiet_libraries

if TYPE_CHECKING:
    from inference import SpeculativeDecoder

_STANDARD_INPUT = "-"
_LONG = 4000  # number of characters from which a prompt may take seconds to read


@quiet_libraries()
def generate(
    context: options.Context,
    drafter: options.DrafterName,
    prompt: Annotated[
        str, typer.Argument(help="Question to answer or text to continue; - for standard input.")
    ],
    target: options.TargetOfDrafter = None,
    raw: options.Raw = False,
    system: options.System = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed gives the same sampled text; with a seed, all trees have one size."
        ),
    ] = None,
    tree: options.TreeChoice = "auto",
    threads: options.ThreadCount = "auto",
    packed: options.PackedWeights = "auto",
    compiled: options.Compiled = False,
    captured: options.Captured = False,
    other_weights: options.OtherWeights = False,
    batch_invariant: options.BatchInvariant = False,
    stats: options.Stats = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Answer a question or continue a text as the target would, but faster.

    Greedy text is exactly the target's in float32, and in half precision up to rounding.
    """
    text = prompt_text(prompt)
    refuse_missing_parts(drafter, target)
    from inference.generation.streaming import TextPrinter

    decoder = load_decoder(context)
    is_chat = _is_chat(decoder, raw, system)
    if len(text) > _LONG and decoder.tokenizer is not None:
        say(f"reading a prompt of {len(decoder.tokenizer(text).input_ids)} tokens")
    sampling: dict[str, Any] = {"top_p": top_p, "top_k": top_k}
    output = decoder.generate(
        messages(text, system) if is_chat else text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        streamer=TextPrinter(decoder.tokenizer, _write),
        **{name: value for name, value in sampling.items() if value is not None},
    )
    typer.echo()
    if not (output.text or "").strip() and len(output.new_token_ids) < max_new_tokens:
        say(f"the model ended the text at once; remedy: {_remedy(is_chat, raw)}")
    if stats:
        say(output.stats.summary)


def load_decoder(context: options.Context) -> "SpeculativeDecoder":
    """Return the decoder that the options of the running command describe.

    The name, dtype and size of the target are printed to standard error if the dtype was chosen
    automatically or the target was converted from a GGUF file.

    Args:
        context: context of `jakiro generate` or `jakiro chat`.
    """
    from inference import SpeculativeDecoder
    from jakiro.utils.gguf import gguf_checksum
    from jakiro.utils.pretrained import choose_device, describe_model

    chosen = context.params
    decoder = SpeculativeDecoder.from_pretrained(
        chosen["drafter"],
        chosen["target"],
        chosen["tree"],
        compiled=chosen["compiled"],
        captured=chosen["captured"],
        packed=options.as_packed(chosen["packed"]),
        threads=options.as_threads(chosen["threads"]),
        other_weights=chosen["other_weights"],
        batch_invariant=chosen["batch_invariant"],
        dtype=chosen["dtype"],
        device_map=choose_device(chosen["device"]),
    )
    model: Any = decoder.target.model
    if chosen["dtype"] == "auto" or gguf_checksum(model.config) is not None:
        say(f"target: {describe_model(model)}")
    return decoder


def _write(text: str) -> None:
    """Write a piece of text, to a terminal without control characters."""
    typer.echo(text.translate(UNSAFE) if sys.stdout.isatty() else text, nl=False)


def prompt_text(prompt: str) -> str:
    """Return the prompt, which is not empty; from standard input, without its last newline.

    Args:
        prompt: prompt on the command line.

    Raises:
        PromptError: the prompt is empty, or not in UTF-8.
    """
    text = _standard_input() if prompt == _STANDARD_INPUT else prompt
    if not text.strip():
        raise PromptError("the prompt is empty", expected="a question or a text", got=repr(text))
    return text


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise PromptError(
            "cannot read the prompt from standard input", expected="text in UTF-8", got=error
        ) from error


def _is_chat(decoder: "SpeculativeDecoder", raw: bool, system: str | None) -> bool:
    """Print and return whether the prompt is sent as a chat message.

    Raises:
        PromptError: there is a system prompt, but the chat template is not used.
    """
    has_template = decoder.tokenizer is not None and decoder.tokenizer.chat_template is not None
    is_chat = has_template and not raw
    if system is not None and not is_chat:
        raise PromptError(
            "--system can only be used with the chat template of the target",
            expected="a target with a chat template, and no --raw",
            got="--raw" if raw else "a tokenizer without a chat template",
            remedy="leave out --system" + (" or --raw" if has_template else ""),
        )
    if is_chat:
        say("answering with the target's chat template; --raw continues the prompt as plain text")
    else:
        reason = "--raw" if raw else "the target has no chat template"
        say(f"continuing the prompt as plain text ({reason})")
    return is_chat


def messages(text: str, system: str | None) -> list[dict[str, Any]]:
    """Return the messages of a chat that begins with a question.

    Args:
        text: the question.
        system: system prompt; None for none.
    """
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": text}]


def _remedy(is_chat: bool, raw: bool) -> str:
    if is_chat:
        return "ask in other words, sample with --temperature 0.7, or try --raw"
    return "leave out --raw" if raw else "use a longer prompt, or sample with --temperature 0.7"
