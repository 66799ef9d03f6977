"""Requests to a server with OpenAI's interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ServerPrompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ServerRequest:
    """A prompt, and the options of its answer.

    Attributes:
        prompt: text or token ids to continue, or messages to answer.
        max_tokens: largest number of new tokens.
        temperature: temperature; 0 for greedy decoding, None for the server's default.
        top_p: as in OpenAI's interface; None for the server's default.
        seed: seed of the random numbers; None to send none.
        is_streamed: whether the text is sent while it is generated.
        has_log_probs: whether to ask for log-probabilities, which come with the single tokens.
        others: further fields of the body.
    """

    prompt: ServerPrompt
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    is_streamed: bool = True
    has_log_probs: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Whether the prompt consists of messages."""
        prompt = self.prompt
        return not isinstance(prompt, str) and isinstance(prompt[0], Mapping)

    @property
    def path(self) -> str:
        """The path below the server's URL."""
        return "chat/completions" if self.is_chat else "completions"

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON object to send; options that are None are left out."""
        options = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            **self.others,
        }
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        body: dict[str, Any] = {"model": model, "messages" if self.is_chat else "prompt": prompt}
        body |= {name: value for name, value in options.items() if value is not None}
        if self.has_log_probs:
            body["logprobs"] = True if self.is_chat else 1
        if self.is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


def prompt_for(prompt: Any, *, as_chat: bool) -> ServerPrompt:
    """Return a prompt as a server expects it.

    Args:
        prompt: text, token ids, or messages.
        as_chat: whether a text becomes the message of a user.
    """
    is_text = isinstance(prompt, str)
    return [{"role": "user", "content": prompt}] if is_text and as_chat else prompt
