"""Dialogues of `jakiro chat` without the terminal: messages, commands, streamed answers."""

from collections.abc import Generator
from contextlib import closing
from typing import Any

from inference import Conversation, SpeculativeDecoder
from inference.engine.stats import DecodeStats
from inference.generation.prompts import encode_prompt, needed
from inference.generation.streaming import TextPiece, pieces_by_depth
from jakiro.cli.settings import DialogueSettings
from jakiro.errors import PromptError

HELP = """\
/help    show this list
/reset   start a new chat with the same system prompt
/stats   show statistics of the last answer and of all answers
/quit    end the chat
A line that starts with a space is a message, even if / follows."""


class Dialogue:
    """A chat with a target, in which every answer is decoded with a drafter.

    Cached tokens of earlier chat turns are not processed again. An answer can be interrupted; the
    text that was generated before remains part of the chat.

    Attributes:
        notice: remark on the last answer; None for a complete answer.
    """

    def __init__(self, decoder: SpeculativeDecoder, settings: DialogueSettings) -> None:
        self.tokenizer = needed(decoder.tokenizer)
        if self.tokenizer.chat_template is None:
            raise PromptError(
                "the target has no chat template, so it is not a chat model",
                remedy="continue plain texts with `jakiro generate`",
            )
        self.decoder = decoder
        self.settings = settings
        self.messages: list[dict[str, Any]] = []
        self.notice: str | None = None
        self.last = DecodeStats(from_prefill=0)
        self.total = DecodeStats(from_prefill=0)
        self.is_over = False
        self._num_answers = 0
        self._conversation = Conversation()

    def answer(self, question: str) -> Generator[TextPiece, None, None]:
        """Yield the answer to a question piece by piece, and append both to the messages.

        If the answer has no text, the question is dropped as well.
        """
        message = {"role": "user", "content": question}
        prompt = self._encode([*self.messages, message])
        limit = self._limit(prompt)
        written: list[str] = []
        try:
            with closing(self._tokens(prompt, limit)) as tokens:
                for piece in pieces_by_depth(tokens, self.tokenizer):
                    written.append(piece.text)
                    yield piece
        except KeyboardInterrupt:
            # The interrupted forward pass may have left the caches incomplete.
            self._conversation.close()
            raise
        finally:
            self._finish(message, "".join(written))
        self.notice = self._remark("".join(written), limit)

    def execute(self, line: str) -> str:
        """Execute a command, and return the reply for the user."""
        match line.split()[0]:
            case "/help":
                return HELP
            case "/reset":
                self.messages = []
                return "new chat"
            case "/stats":
                summary = f"last answer: {self.last.summary}\nall answers: {self.total.summary}"
                return summary if self.total.emitted else "no answer yet"
            case "/quit":
                self.is_over = True
                return "end of the chat"
        raise PromptError(
            f"there is no command {line.split()[0]}",
            remedy="/help lists the commands; to send the line as a message, begin it with a space",
        )

    def close(self) -> None:
        """Free the caches."""
        self._conversation.close()

    def _encode(self, messages: list[dict[str, Any]]) -> list[int]:
        system = self.settings.system
        start = [{"role": "system", "content": system}] if system else []
        vocab_size = self.decoder.target.spec.vocab_size
        return encode_prompt([*start, *messages], self.tokenizer, vocab_size)

    def _limit(self, prompt: list[int]) -> int:
        """Return the largest number of tokens of an answer."""
        context = self.decoder.target.spec.max_position
        if len(prompt) >= context:
            raise PromptError(
                f"the chat has filled the target's context of {context} tokens",
                remedy="start a new chat with /reset, or send a shorter message",
            )
        return min(self.settings.max_new_tokens, context - len(prompt))

    def _tokens(self, prompt: list[int], limit: int) -> Generator[tuple[int, int], None, None]:
        """Yield the id and the depth of each token of an answer."""
        self._conversation.stats = DecodeStats(from_prefill=0)
        given = self.settings.given | {"max_new_tokens": limit}
        if "seed" in given:  # every answer has its own random numbers
            given["seed"] += self._num_answers
        steps = self.decoder.steps(prompt, conversation=self._conversation, **given)
        self._num_answers += 1
        with closing(steps):
            for step in steps:
                yield from zip(step.token_ids, step.depths, strict=True)

    def _finish(self, question: dict[str, Any], text: str) -> None:
        self.last = self._conversation.stats
        if self.last.emitted:
            self.total = DecodeStats.pooled([self.total, self.last])
        if text.strip():
            self.messages += [question, {"role": "assistant", "content": text}]

    def _remark(self, text: str, limit: int) -> str | None:
        if self.last.emitted >= limit:
            if limit < self.settings.max_new_tokens:
                return "the target's context is full; /reset starts a new chat"
            return f"the answer has reached the limit of {limit} tokens; --max-new-tokens raises it"
        if not text.strip():
            return "the model ended its answer at once; ask in other words"
        return None
