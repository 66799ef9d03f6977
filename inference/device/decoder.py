"""A decoder that drafts on this machine, and whose target verifies on a server."""

import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, Literal

from pydantic import ValidationError

from inference.device.drafting import device_drafter, memory_request
from inference.device.link import ServerLink
from inference.device.offline_text import OfflineText, OfflineWriting
from inference.device.text import RemoteOutput, RemoteStep, RemoteText
from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.memory import row_format
from inference.protocol import Drafter, RequestTicket, request_counter_of
from inference.remote.messages import ChatMessage, OpenSession, RowEncoding
from inference.sampling.random_numbers import random_stream
from jakiro.errors import ConfigError, PromptError

RemotePrompt = str | Sequence[int] | Sequence[dict[str, Any]]

_SEEDS = 2**63


class RemoteDecoder:
    """A lossless decoder whose drafter runs here and whose target runs on a server.

    The server is `jakiro serve` with `--remote-sessions`. It decides about all tokens, so the text
    is that of its target: greedy text equals the target's greedy text, and sampled text follows its
    distribution. Each decoding step is one request, which may be repeated. If the connection is
    lost, or the server is started again, the same text continues. This machine needs neither the
    target nor its tokenizer.

    Args:
        drafter: drafter that reads tokens alone, such as `LookupDrafter`, `AdedDrafter`, or a
            `SmallLMDrafter`; a `TrainedDrafter`, whose memory a server with the same drafter
            encodes; or a name: `lookup`, `aded`, `lm=MODEL`, a smaller model with the target's
            tokenizer, or a folder of `jakiro export --to device`. None or `none` to draft nothing.
        memory: encoding of the memory that a trained drafter reads: exact, bf16, or int8. The text
            follows the same distribution with each of them.
        offline: options of texts that the drafter continues alone while the server cannot be
            reached. Such text is provisional: the server verifies it as soon as it can be reached
            again, and what stays is the target's own text. None to wait, and to raise an error if
            the server does not return; or `stop` to end the text with what was verified then, with
            the error in the output.
        **load: arguments of `jakiro.utils.pretrained.load_causal_lm` for a smaller model.

    Example:
        decoder = RemoteDecoder("http://127.0.0.1:8000/v1", LookupDrafter())
        output = decoder.generate("def main(", max_new_tokens=32, temperature=0)
        print(output.text, output.stats.tau, output.traffic.bytes_up)
    """

    def __init__(
        self,
        url: str,
        drafter: Drafter | str | None = None,
        *,
        key: str | None = None,
        patience: float = 60.0,
        memory: RowEncoding = "exact",
        offline: OfflineWriting | Literal["stop"] | None = None,
        **load: Any,
    ) -> None:
        self._link = ServerLink(url, key, patience)
        try:
            self.info = self._link.info()
            if isinstance(drafter, str):
                name, drafter = drafter, device_drafter(drafter, self.info, **load)
                if isinstance(offline, OfflineWriting):
                    offline = offline.with_tokenizer_of(name)
            self._memory = memory_request(drafter, self.info, memory)
            is_writing = isinstance(offline, OfflineWriting)
            if offline not in (None, "stop") and not (is_writing and drafter is not None):
                raise ConfigError(
                    "offline is OfflineWriting(...) with a drafter, 'stop', or None to wait"
                )
        except BaseException:
            self._link.close()
            raise
        self.drafter = drafter
        self.offline = offline

    def __repr__(self) -> str:
        return (
            f"RemoteDecoder(url={self._link.url!r}, target={self.info.model!r}, "
            f"drafter={self.drafter!r})"
        )

    def __enter__(self) -> "RemoteDecoder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._link.close()

    def generate(
        self,
        prompt: RemotePrompt,
        *,
        on_step: Callable[[RemoteStep], object] | None = None,
        **options: Any,
    ) -> RemoteOutput:
        """Return the continuation of a prompt.

        Args:
            **options: `max_new_tokens`, 128 by default; `temperature`, 0 for greedy decoding, or
                the target's own by default; `top_p`, `top_k`, `min_p`; `stop`, strings before which
                the text ends; `seed`.

        Raises:
            ResourceError: the server cannot be reached any more, or its answers cannot be read;
                with `offline`, only before the first token.
            MessageError: the server has another target than before, refuses a tree, or answers with
                something that contradicts the text so far.
        """
        text = self._text(prompt, **options)
        with closing(text.steps()) as steps:
            for step in steps:
                if on_step is not None:
                    on_step(step)
        return text.output()

    def stream(self, prompt: RemotePrompt, **options: Any) -> Iterator[str]:
        with closing(self.steps(prompt, **options)) as steps:
            for step in steps:
                if step.text and step.is_verified:
                    yield step.text

    def steps(self, prompt: RemotePrompt, **options: Any) -> Generator[RemoteStep, None, None]:
        """Yield the decoding steps that continue a prompt, each as soon as it is verified.

        With `offline`, steps that are not verified come as well. The next verified step replaces
        all of them.

        Closing the generator ends the text, and frees its memory on the server.
        """
        return self._text(prompt, **options).steps()

    def _text(self, prompt: RemotePrompt, *, seed: int | None = None, **options: Any) -> RemoteText:
        counter = request_counter_of(self.drafter)
        ticket = None if counter is None else counter.take()
        seed = secrets.randbelow(_SEEDS) if seed is None else seed
        request = _request(prompt, _seed(seed, ticket), memory=self._memory, **options)
        rows = None
        if (memory := request.memory) is not None and (offer := self.info.memory) is not None:
            assert isinstance(self.drafter, TrainedDrafter), "no other drafter has a memory"
            rows = row_format(self.drafter.model, offer.dtype, memory.encoding)
        parts = self._link, request, self.drafter, rows
        if isinstance(self.offline, OfflineWriting):
            return OfflineText(*parts, options=self.offline, ticket=ticket, seed=seed)
        return RemoteText(*parts, stops=self.offline is not None, ticket=ticket, seed=seed)


def _request(
    prompt: RemotePrompt,
    seed: int,
    *,
    max_new_tokens: int = 128,
    stop: Sequence[str] = (),
    **sampling: Any,
) -> OpenSession:
    try:
        return OpenSession(
            prompt=_messages(prompt),
            seed=seed,
            max_tokens=max_new_tokens,
            stop=[stop] if isinstance(stop, str) else list(stop),
            **sampling,
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise PromptError(f"{first['loc'][0]} cannot be used", expected=first["msg"]) from error


def _messages(prompt: RemotePrompt) -> str | list[int] | list[ChatMessage]:
    if isinstance(prompt, str):
        return prompt
    items: list[Any] = list(prompt)
    if items and isinstance(items[0], dict):
        return [ChatMessage(**message) for message in items]
    return items


def _seed(seed: int, ticket: RequestTicket | None) -> int:
    """Return the seed of a text's random numbers.

    What a drafter has learned from a text depends on the text's random numbers, so no later text
    may have the same random numbers.
    """
    if ticket is None or ticket.number == 0:
        return seed % _SEEDS
    return int(random_stream(seed, ticket.number).integers(_SEEDS))
