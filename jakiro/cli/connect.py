"""The command `jakiro connect`, and how it shows text that is not verified yet."""

import os
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field
from rich.cells import chop_cells

from jakiro.cli import options
from jakiro.cli.decode import prompt_text
from jakiro.cli.output import UNSAFE, lines, say
from jakiro.cli.settings import LoadSettings, PromptSettings, SamplingSettings, server_key
from jakiro.errors import ConfigError, JakiroError, PromptError
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.settings import Settings

if TYPE_CHECKING:
    from inference.device import RemoteDecoder
    from inference.device.text import RemoteOutput, RemoteStep

_UNVERIFIED = "the end of the text is not verified"
_PATIENCE = {"wait": 60.0, "stop": 10.0, "write": 60.0}  # seconds
_FAINT, _NORMAL = "\x1b[2;4m", "\x1b[0m"  # faint and underlined


class ConnectSettings(Settings):
    """Drafts on this machine."""

    drafter: str = "lookup"
    """Drafter on this machine: lookup, aded, lm=MODEL (a smaller model with the target's
    tokenizer), none, or a folder of `jakiro export --to device`."""
    memory: Literal["exact", "bf16", "int8"] = "exact"
    """Encoding of the memory that the server sends to a trained drafter. int8 needs about a quarter
    of the bytes of exact float32, and may change drafts, but never the text's distribution."""
    patience: float | None = Field(None, ge=0)
    """Seconds without any answer after which a text is given up: 60, or 10 with --offline stop."""
    offline: Literal["wait", "stop", "write"] = "wait"
    """What happens while the server cannot be reached. wait: nothing is written. stop: the text
    soon ends with what was verified, and a message says how to go on. write: the drafter goes on
    alone, which lm=MODEL and trained drafters can do. Such text is faint and underlined until the
    server has verified it, and the part that the target would not have written is replaced."""

    def decoder(self, url: str, load: LoadSettings) -> "RemoteDecoder":
        """Return the decoder, which is connected to the server."""
        from inference.device import RemoteDecoder
        from inference.device.offline_text import OfflineWriting

        if self.offline == "write" and self.drafter in ("lookup", "aded", "none"):
            raise ConfigError(
                f"{self.drafter} cannot write alone while the server cannot be reached",
                remedy="use lm=MODEL or a folder of `jakiro export --to device`",
            )
        reactions: dict[str, Any] = {"wait": None, "stop": "stop", "write": OfflineWriting()}
        return RemoteDecoder(
            url,
            self.drafter,
            key=server_key(),
            memory=self.memory,
            patience=_PATIENCE[self.offline] if self.patience is None else self.patience,
            offline=reactions[self.offline],
            dtype=load.dtype,
            device=load.torch_device,
        )


@options.with_options
@quiet_libraries()
def connect(
    *,
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
    asked: PromptSettings,
    settings: ConnectSettings,
    sampling: SamplingSettings,
    load: LoadSettings,
) -> None:
    """Draft on this machine, and let the target of a server verify.

    The text is exactly the target's. It goes on after lost connections and restarts of the server.
    """
    text = None if prompt is None else prompt_text(prompt)
    with settings.decoder(url, load) as decoder:
        is_chat = decoder.info.has_template and not asked.raw
        if not is_chat and (text is None or asked.system is not None):
            raise PromptError(
                "only a chat has messages and a system prompt",
                got="--raw, or a target without a chat template",
                remedy="pass a prompt to continue, and leave out --system",
            )
        if text is None:
            _chat(decoder, asked, sampling.given)
            return
        whole = asked.messages(text) if is_chat else text
        again = "to get all of it, run the same command with --seed {seed}"
        _answer(decoder, whole, sampling.given, asked.stats, again)


def _chat(decoder: "RemoteDecoder", asked: PromptSettings, chosen: dict[str, Any]) -> None:
    """Answer each line of standard input.

    Each answer has random numbers of its own, because its prompt contains the earlier answers,
    which depend on theirs.
    """
    dialogue = asked.messages("")[:-1]
    seed = chosen.get("seed")
    for number, line in enumerate(filter(str.strip, lines())):
        turn = {"role": "user", "content": line.strip()}
        varied = {**chosen, "seed": None if seed is None else seed + number}
        try:
            again = "for a whole answer, send the message again"
            output = _answer(decoder, [*dialogue, turn], varied, asked.stats, again)
        except (KeyboardInterrupt, JakiroError) as error:
            if not sys.stdin.isatty():
                raise
            is_stopped = isinstance(error, KeyboardInterrupt)
            reason = "stopped; the dialogue goes on without this message"
            say(reason if is_stopped else f"error: {error}")
            continue
        dialogue += [turn, {"role": "assistant", "content": output.text or ""}]


def _answer(
    decoder: "RemoteDecoder", prompt: Any, chosen: dict[str, Any], stats: bool, again: str
) -> "RemoteOutput":
    """Print the continuation of a prompt as it arrives, and return its output.

    Raises:
        ResourceError: the end of the text is missing or not verified, because the server did not
            return.
    """
    # A terminal that cannot move its cursor shows only verified text, like a file.
    can_move = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    display = ProvisionalDisplay(_write, can_move)

    def on_step(step: "RemoteStep") -> None:
        show = display.verified if step.is_verified else display.provisional
        show(step.text.translate(UNSAFE) if sys.stdout.isatty() else step.text)

    try:
        output = decoder.generate(prompt, on_step=on_step, **chosen)
    except KeyboardInterrupt:
        typer.echo()
        if display.has_provisional:
            say(_UNVERIFIED)
        raise
    typer.echo()
    _say_notes(output, stats, again)
    if output.error is not None:
        raise output.error
    return output


def _say_notes(output: "RemoteOutput", stats: bool, again: str) -> None:
    """Print what a user should know about a text besides its error."""
    from inference.device.offline_text import OfflineOutput

    if isinstance(output, OfflineOutput):
        counts = output.provisional
        if counts.num_written:
            say(
                f"{counts.num_written} provisional tokens: {counts.num_kept} verified, "
                f"{counts.num_retracted} replaced, {len(counts.unverified)} not verified"
            )
        if counts.unverified:
            say(_UNVERIFIED)
    if stats:
        traffic = output.traffic
        say(
            f"{output.stats.summary}; {traffic.num_calls} requests ({traffic.num_repeats} of them "
            f"repeated), {traffic.bytes_up} bytes sent, {traffic.bytes_down} received, "
            f"{traffic.num_resumes} times resumed"
        )
    if output.error is not None and not isinstance(output, OfflineOutput):
        say(
            f"the text was stopped after {len(output.new_token_ids)} verified tokens; "
            f"{again.format(seed=output.seed)}"
        )


def _write(text: str) -> None:
    typer.echo(text, nl=False, color=True)


class ProvisionalDisplay:
    """Writes verified text, and after it provisional text, which verified text replaces.

    Args:
        is_terminal: whether text can be erased; otherwise, only verified text is written.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        is_terminal: bool,
        size: os.terminal_size | None = None,
    ) -> None:
        self._write = write
        self._is_terminal = is_terminal
        self._size = size
        self._line = ""  # verified text of the last line
        self._provisional = ""  # text after it

    def verified(self, text: str) -> None:
        """Write text that stays, in place of all provisional text."""
        if self.has_provisional:
            self._erase()
        self._write(text)
        self._line = (self._line + text).rpartition("\n")[2]

    def provisional(self, text: str) -> None:
        """Write text that may be replaced."""
        if self._is_terminal and text:
            self._write(f"{_FAINT}{text}{_NORMAL}")
            self._provisional += text

    @property
    def has_provisional(self) -> bool:
        """Whether there is provisional text at the end."""
        return bool(self._provisional)

    def _erase(self) -> None:
        """Go back to the verified text, or begin a new line if it has left the screen."""
        columns, num_rows = self._size or shutil.get_terminal_size()
        lines = (self._line + self._provisional).expandtabs().split("\n")
        up = sum(max(len(chop_cells(line, columns)), 1) for line in lines) - 1
        if up >= num_rows:
            self._line = ""
            self._write("\n")
        else:
            self._write("\r" + (f"\x1b[{up}A" if up else "") + f"\x1b[J{self._line}")
        self._provisional = ""
