"""The command line: parses options, runs commands, and reports user errors in one line.

Commands import their dependencies inside their bodies, so that `jakiro --help` does not import
torch.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from jakiro import __version__
from jakiro.cli.bench import bench
from jakiro.cli.chat import chat
from jakiro.cli.connect import connect
from jakiro.cli.data import prepare, regenerate, synthesize
from jakiro.cli.decode import demo, fetch, generate, serve
from jakiro.cli.exchange import export_drafter, import_drafter
from jakiro.cli.output import say
from jakiro.cli.train import ablate, init, train
from jakiro.cli.verify import verify
from jakiro.errors import EXIT_CODE_BAD_INPUT, EXIT_CODE_INTERRUPTED, JakiroError
from jakiro.utils.files import explain_failed_access
from jakiro.utils.packaged import missing_extra

_DEBUG = "--debug"
_LIBRARY_WORDS = "Value error, "  # before messages about options with a fixed set of values
_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Decode": {
        **{"fetch": fetch, "generate": generate, "chat": chat},
        **{"serve": serve, "connect": connect, "demo": demo},
    },
    "Train": {"init": init, "train": train, "ablate": ablate},
    "Measure": {"bench": bench, "verify": verify},
    "Data": {"regenerate": regenerate, "synthesize": synthesize},
    "Exchange": {"import": import_drafter, "export": export_drafter},
}

# By default, idle threads of GNU OpenMP spin for so long that, while another process is busy, every
# small operation waits for a time slice. If they spin too briefly, they fall asleep between the
# operations of a forward pass. The variable is read when torch is imported; it would override a
# policy that the user has set.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")

app = typer.Typer(name="jakiro", add_completion=False, pretty_exceptions_enable=False)


def _use_huge_pages() -> None:
    """Start this process again with memory in pages of 2 MiB, unless the user has tuned malloc.

    Steps are about 5% shorter if the processor looks up fewer pages while it reads all weights. The
    C library reads the setting only when a process starts.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its exit code.

    The exit code is 0 on success, 1 if a check has failed, 2 on bad input, and 130 after an
    interruption.

    Args:
        arguments: command-line arguments without the name of the program; None for those of this
            process.

    Raises:
        SystemExit: always, unless an unexpected exception propagates.
    """
    if arguments is None:
        _use_huge_pages()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # `--debug` is removed here, so that it may come before or after the name of the command.
        words_of_command = [word for word in words if word != _DEBUG]
        code = app(words_of_command or ["--help"], prog_name="jakiro", standalone_mode=False)
    except Exception as error:
        explained = _explainable(error)
        if explained is None:
            raise
        if _DEBUG in words:
            traceback.print_exception(error)
        say(f"error: {_explain(explained)}")
        code = EXIT_CODE_BAD_INPUT
    if code == EXIT_CODE_INTERRUPTED:  # typer uses this code as well
        say("interrupted")
    sys.exit(code)


def _explainable(error: Exception) -> JakiroError | typer.TyperException | None:
    """Return an error whose message tells users what to do; None for an unexpected error."""
    if isinstance(error, JakiroError | typer.TyperException):
        return error
    if isinstance(error, ModuleNotFoundError):
        return missing_extra(error)
    return explain_failed_access(error)


def _explain(error: JakiroError | typer.TyperException) -> str:
    if isinstance(error, JakiroError):
        return str(error)
    context: Any = getattr(error, "ctx", None)
    command = "jakiro" if context is None else context.command_path
    message = error.format_message().rstrip(".").replace(_LIBRARY_WORDS, "")
    return f"{message}; remedy: see `{command} --help`"


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
    debug: Annotated[bool, typer.Option(_DEBUG, help="Show the tracebacks of errors.")] = False,
) -> None:
    """Lossless speculative decoding for Hugging Face causal LMs: the same output, faster."""


for _panel, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_panel)(_command)
app.add_typer(prepare, rich_help_panel="Data")
