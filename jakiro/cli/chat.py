"""The command `jakiro chat`."""

import sys
from contextlib import closing
from typing import TYPE_CHECKING

import typer

from jakiro.cli import options
from jakiro.cli.output import UNSAFE, lines
from jakiro.cli.settings import DecoderSettings, DialogueSettings
from jakiro.errors import EXIT_CODE_BAD_INPUT, JakiroError
from jakiro.utils.logs import quiet_libraries

if TYPE_CHECKING:
    from inference.generation.streaming import TextPiece
    from jakiro.cli.dialogue import Dialogue

_GREETING = "/help lists the commands; Ctrl-C stops an answer, and Ctrl-D ends the chat"


@options.with_options
@quiet_libraries()
def chat(
    *,
    drafter: options.DrafterName,
    dialogue: DialogueSettings,
    settings: DecoderSettings,
) -> None:
    """Chat with a target in the terminal; colors show which tokens were drafted.

    If standard input is not a terminal, each of its lines is a message. Lines with a wrong command
    are then reported and skipped, and the exit code is 2.
    """
    from jakiro.cli.dialogue import Dialogue

    with closing(Dialogue(settings.load(drafter), dialogue)) as chat:
        _Terminal(chat).run()


class _Terminal:
    """The terminal of a dialogue: reads lines, and writes answers and replies to commands.

    Answers go to standard output, and everything else goes to standard error.
    """

    def __init__(self, dialogue: "Dialogue") -> None:
        from rich.console import Console

        self.dialogue = dialogue
        self.is_interactive = sys.stdin.isatty()
        self._is_misspelt = False  # whether there was a wrong command
        self._answers = Console(highlight=False)
        self._notices = Console(stderr=True, highlight=False)

    def run(self) -> None:
        """Answer lines until the input or the chat ends."""
        if self.is_interactive:
            self._say(_GREETING)
        for line in lines():
            self._handle(line)
            if self.dialogue.is_over:
                break
        if self._is_misspelt and not self.is_interactive:
            raise typer.Exit(EXIT_CODE_BAD_INPUT)

    def _handle(self, line: str) -> None:
        num_messages = len(self.dialogue.messages)
        try:
            if line.startswith("/"):
                self._execute(line)
            elif line.strip():
                self._answer(line.strip())
        except JakiroError as error:
            if not self.is_interactive:
                raise
            self._say(f"error: {error}")
        except KeyboardInterrupt:
            if not self.is_interactive:
                raise
            is_kept = len(self.dialogue.messages) > num_messages
            self._say(f"\n[stopped{'; the text above stays in the chat' if is_kept else ''}]")

    def _execute(self, line: str) -> None:
        """Execute a command; a wrong one does not end the chat, even if it comes from a file."""
        try:
            self._say(self.dialogue.execute(line))
        except JakiroError as error:
            self._is_misspelt = True
            self._say(f"error: {error}")
        self._show_legend(line)

    def _answer(self, question: str) -> None:
        with closing(self.dialogue.answer(question)) as pieces:
            for piece in pieces:
                self._write(piece)
        typer.echo()
        if self.dialogue.notice is not None:
            self._say(f"[{self.dialogue.notice}]")

    def _write(self, piece: "TextPiece") -> None:
        from inference.generation.streaming import terminal_style

        if self._answers.is_terminal:
            text, style = piece.text.translate(UNSAFE), terminal_style(piece.depth)
            self._answers.out(text, style=style, highlight=False, end="")
        else:
            typer.echo(piece.text, nl=False)

    def _say(self, text: str) -> None:
        self._notices.out(text, highlight=False)

    def _show_legend(self, line: str) -> None:
        from inference.generation.streaming import DEEPEST_COLOR, terminal_legend

        is_colored = self._answers.is_terminal and not self._answers.no_color
        if line.startswith("/help") and is_colored:
            self._notices.print(terminal_legend(range(DEEPEST_COLOR + 1)))
