"""The command line: it parses, hands over, and turns a caller's mistake into one clear line.

Commands import their work inside their bodies: `jakiro --help` must not wait for torch.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jakiro import __version__
from jakiro.errors import ConfigError, JakiroError

if TYPE_CHECKING:
    from inference.verify import Check

EXIT_CODE_BAD_INPUT = 2
EXIT_CODE_INTERRUPTED = 130  # typer turns an interruption into this code

_DEBUG = "--debug"

# Threads that wait shall yield soon: GNU OpenMP's spin so long that, beside another busy process,
# each of our many small operations waits for a time slice. Read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

app = typer.Typer(name="jakiro", add_completion=False, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 when done, 1 if it says no, 2 on bad input, 130 if interrupted.

    Args:
        arguments: the words after the program's name; by default those of this process.

    Raises:
        SystemExit: always, unless the program itself is at fault.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Taken out here, so that it may stand before or after the command's name.
        words_of_command = [word for word in words if word != _DEBUG]
        code = app(words_of_command, prog_name="jakiro", standalone_mode=False)
    except (JakiroError, typer.TyperException) as error:
        if _DEBUG in words:
            traceback.print_exception(error)
        _say(f"error: {_explain(error)}")
        code = EXIT_CODE_BAD_INPUT
    if code == EXIT_CODE_INTERRUPTED:
        _say("interrupted")
    sys.exit(code)


def _explain(error: JakiroError | typer.TyperException) -> str:
    if isinstance(error, JakiroError):
        return str(error)
    return f"{error.format_message().rstrip('.')}; remedy: see `jakiro --help`"


def _say(message: str) -> None:
    typer.echo(" ".join(message.split()), err=True)  # one line, whatever a parser quoted


def _show_version(is_asked: bool) -> bool:
    if is_asked:
        typer.echo(f"jakiro {__version__}")
        raise typer.Exit
    return is_asked


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[bool, typer.Option(_DEBUG, help="Show tracebacks of errors.")] = False,
) -> None:
    """Exact speculative decoding: draft with a small model, keep the target's own distribution."""


@app.command()
def demo(
    preset: Annotated[
        Literal["smoke", "small"], typer.Option(help="How much to train: seconds or minutes.")
    ] = "small",
    cache_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where trained models are kept; by default the user's."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")
    ] = "auto",
    target: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_HUB_ID", help="A causal LM to draft for, instead of a small one."
        ),
    ] = None,
) -> None:
    """Train a drafter for a target, generate with both, and show what drafting gains."""
    from jakiro.demo.pipeline import run_demo

    run_demo(preset=preset, cache_dir=cache_dir, device=device, target=target)


@app.command()
def generate(
    drafter: Annotated[str, typer.Argument(help="Folder or hub id of a drafter.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    target: Annotated[
        str | None, typer.Option(help="Where the target is, if not where the drafter says.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the continuation.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    tree: Annotated[
        Literal["trained", "auto"],
        typer.Option(help="Trees as trained, or in each round what pays on this machine."),
    ] = "trained",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile decoding steps; the first ones take long.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print figures to stderr.")] = False,
) -> None:
    """Continue a text as the target would, with the help of its drafter."""
    from inference.decoder import SpeculativeDecoder
    from inference.streaming import TextPrinter

    decoder = SpeculativeDecoder.from_pretrained(
        drafter, target, "auto" if tree == "auto" else None, compiled=compiled
    )
    output = decoder.generate(
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        streamer=TextPrinter(decoder.tokenizer, partial(typer.echo, nl=False)),
    )
    typer.echo()
    if stats:
        figures = output.stats
        _say(
            f"{figures.emitted} tokens, tau {figures.tau:.2f}, {figures.tokens_per_second:.1f}"
            f" tokens/s after {figures.seconds['prefill'] * 1e3:.0f} ms of prefill,"
            f" {decoder.bytes_per_token} bytes per cached token"
        )


@app.command()
def verify(
    drafter: Annotated[str, typer.Option(help="Folder or hub id of a drafter.")],
    target: Annotated[
        str | None, typer.Option(help="Where the target is, if not where the drafter says.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="One prompt per line: plain text, or .jsonl with the key prompt or messages; "
            "by default a few built-in ones.",
        ),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Use the first ones only.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of greedy continuations.")] = 64,
    samples: Annotated[int, typer.Option(help="Continuations drawn from a prompt.")] = 2000,
    sampled_prompts: Annotated[int, typer.Option(help="Draw from this many prompts.")] = 1,
    temperature: Annotated[float, typer.Option(help="Of the samples.")] = 1.0,
    top_p: Annotated[float | None, typer.Option(help="By default the target's own.")] = None,
    top_k: Annotated[int | None, typer.Option(help="By default the target's own.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same samples.")] = 0,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="float32 leaves no room for rounding; auto is the target's own."),
    ] = "auto",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")
    ] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Store the figures here, too.")
    ] = None,
) -> None:
    """Check on your own models that decoding with this drafter is lossless; exit code 1 if not."""
    from inference.decoder import SpeculativeDecoder
    from inference.verify import VerifySettings, verify_losslessness
    from inference.verify.prompts import BUILT_IN, read_prompts
    from jakiro.settings import validate_settings
    from training.processes import choose_device

    options = {
        "max_new_tokens": max_new_tokens,
        "num_prompts": num_prompts,
        "samples": samples,
        "sampled_prompts": sampled_prompts,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    settings = validate_settings(VerifySettings, options, source="the command line")
    texts = BUILT_IN if prompts is None else read_prompts(prompts)
    store = _writer(json_file)
    decoder = SpeculativeDecoder.from_pretrained(
        drafter, target, dtype=dtype, device_map=choose_device(device)
    )
    verdict = verify_losslessness(decoder, texts, settings, on_check=_show_check)
    store(verdict.model_dump_json(indent=2) + "\n")
    typer.echo(f"{_word(verdict.passed)}  {verdict.target} in {verdict.dtype}: {verdict.summary}")
    if not verdict.passed:
        raise typer.Exit(1)


def _show_check(check: "Check") -> None:
    typer.echo(f"{_word(check.passed)}  {check.name}: {check}")
    for detail in check.details:
        typer.echo(f"      {detail}")


def _word(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def _writer(path: Path | None) -> Callable[[str], None]:
    """Return what stores the figures; a file that is there is refused before any work.

    Raises:
        ConfigError: the file exists, or its folder does not.
    """
    from jakiro.files import write_atomically

    if path is None:
        return lambda _text: None
    if path.exists() or not path.absolute().parent.is_dir():
        raise ConfigError(
            f"cannot store the figures in {path}",
            expected="a new file in a folder that is there",
            got="a file that exists" if path.exists() else "no such folder",
            remedy="choose another name for --json",
        )
    return lambda text: write_atomically(path, text)
