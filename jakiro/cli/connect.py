"""The command `jakiro connect`."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jakiro.cli import options
from jakiro.cli.generate import messages, prompt_text
from jakiro.cli.output import UNSAFE, say
from jakiro.cli.remote_server import server_key
from jakiro.errors import JakiroError, PromptError
from jakiro.utils.logs import quiet_libraries

if TYPE_CHECKING:
    from inference.device import RemoteDecoder
    from inference.device.text import RemoteOutput

_PROMPT = "> "


@quiet_libraries()
def connect(
    url: Annotated[
        str,
        typer.Argument(
            help="Address of a server that was started with `jakiro serve --remote-sessions`. Its "
            "key is read from the environment variable JAKIRO_API_KEY."
        ),
    ],
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Question to answer or text to continue; - for standard input. Without a prompt, "
            "each line of standard input is a message of a chat."
        ),
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="DRAFTER",
            help="Drafter on this machine: lookup, aded, lm=MODEL (a smaller model with the "
            "target's tokenizer), none, or a folder of `jakiro export-device`.",
        ),
    ] = "lookup",
    memory: Annotated[
        Literal["exact", "bf16", "int8"],
        typer.Option(
            help="Encoding of the memory that the server sends to a trained drafter. int8 needs "
            "about a quarter of the bytes of exact float32, and may change drafts, but never the "
            "text's distribution."
        ),
    ] = "exact",
    raw: options.Raw = False,
    system: options.System = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same sampled text.")
    ] = None,
    patience: Annotated[
        float,
        typer.Option(min=0, help="Seconds without any answer after which a text is given up."),
    ] = 60.0,
    stats: options.Stats = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Draft on this machine, and let the target of a server verify.

    The text is exactly the target's. It goes on after lost connections and restarts of the server.
    """
    from inference.device import RemoteDecoder
    from jakiro.utils.pretrained import choose_device

    text = None if prompt is None else prompt_text(prompt)
    chosen: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    load: dict[str, Any] = {"dtype": dtype, "device": choose_device(device)}
    key = server_key()
    with RemoteDecoder(url, drafter, key=key, patience=patience, memory=memory, **load) as decoder:
        is_chat = decoder.info.has_template and not raw
        _refuse_impossible(is_chat, text, system)
        if text is None:
            _chat(decoder, system, chosen, stats)
            return
        _answer(decoder, messages(text, system) if is_chat else text, chosen, stats)


def _refuse_impossible(is_chat: bool, text: str | None, system: str | None) -> None:
    if not is_chat and (text is None or system is not None):
        raise PromptError(
            "only a chat has messages and a system prompt",
            expected="a target with a chat template, and no --raw",
            got="--raw, or a target without a chat template",
            remedy="pass a prompt to continue, and leave out --system",
        )


def _chat(
    decoder: "RemoteDecoder", system: str | None, chosen: dict[str, Any], stats: bool
) -> None:
    """Answer each line of standard input."""
    dialogue = messages("", system)[:-1]
    for line in _lines():
        turn = {"role": "user", "content": line}
        try:
            output = _answer(decoder, [*dialogue, turn], chosen, stats)
        except JakiroError as error:
            if not sys.stdin.isatty():
                raise
            say(f"error: {error}")
            continue
        dialogue += [turn, {"role": "assistant", "content": output.text or ""}]


def _lines() -> Iterator[str]:
    """Yield the lines of standard input that have text."""
    while True:
        if sys.stdin.isatty():
            typer.echo(_PROMPT, nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _answer(
    decoder: "RemoteDecoder", prompt: Any, chosen: dict[str, Any], stats: bool
) -> "RemoteOutput":
    """Print the continuation of a prompt as it arrives, and return its output."""
    output = decoder.generate(prompt, on_text=_write, **chosen)
    typer.echo()
    if stats:
        traffic = output.traffic
        say(
            f"{output.stats.summary}; {traffic.num_calls} requests ({traffic.num_repeats} of them "
            f"repeated), {traffic.bytes_up} bytes sent, {traffic.bytes_down} received, "
            f"{traffic.num_resumes} times resumed"
        )
    return output


def _write(piece: str) -> None:
    typer.echo(piece.translate(UNSAFE) if sys.stdout.isatty() else piece, nl=False)
