"""Conversations: dialogues whose earlier turns are not processed again."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from inference.engine.context import Context
from inference.engine.loop import DecodeRun
from inference.engine.request import Request
from inference.engine.stats import DecodeStats
from jakiro.errors import PromptError


class Conversation:
    """A dialogue that keeps the caches of target and drafter from turn to turn.

    The prompt of each turn must contain the whole dialogue so far. Tokens that are already cached
    are not processed again. The output is the same as without a conversation. A conversation has
    one turn at a time: a second turn, such as one from another thread, is refused.

    Example:
        with Conversation() as conversation:
            first = decoder.generate("Hello", max_new_tokens=8, conversation=conversation)
            longer = "Hello" + first.text + " And then?"
            second = decoder.generate(longer, max_new_tokens=8, conversation=conversation)
    """

    def __init__(self) -> None:
        self._context: Context | None = None
        self._cached: list[int] = []  # tokens in the cache
        self.stats = DecodeStats(from_prefill=0)  # of the last turn
        self._turn = Lock()  # held during a turn
        self._is_closing = False  # whether the caches are freed at the end of the turn

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def num_cached(self) -> int:
        """The number of cached tokens; a prompt that begins with these tokens reuses the cache."""
        return len(self._cached)

    def close(self) -> None:
        """Free the caches, after the current turn if there is one.

        The next turn processes its whole prompt.
        """
        self._is_closing = True
        if self._turn.acquire(blocking=False):
            self._end_turn()

    @contextmanager
    def turn(self, request: Request, **run: Any) -> Iterator[DecodeRun]:
        """Yield a run that reuses the cached tokens; afterwards, the run's tokens are cached.

        Raises:
            PromptError: the conversation was started with another decoder, or its last turn has not
                ended yet.
        """
        if not self._turn.acquire(blocking=False):
            raise PromptError(
                "the last turn of the conversation has not ended yet",
                expected="one turn at a time",
                got="a second turn, from another thread or before the end of steps()",
                remedy="finish or close the last turn first, or use a Conversation for each thread",
            )
        try:
            yield from self._within_turn(request, run)
        finally:
            self._end_turn()

    def _within_turn(self, request: Request, run: dict[str, Any]) -> Iterator[DecodeRun]:
        target, drafter = run["target"], run["drafter"]
        if self._context is None:
            self._context = Context(target, drafter, request.sampling, 1, request.max_length)
        if self._context.target is not target or self._context.drafter is not drafter:
            raise PromptError(
                "the conversation was started with another decoder",
                expected="the same decoder in all turns",
                got="a decoder with another target or drafter",
                remedy="close() the conversation, or start a new one",
            )
        self._context.rollback(self._num_shared(request.token_ids))
        if self._context.session is not None:
            self._context.session.set_sampling(request.sampling)
        decoding = DecodeRun(requests=request, context=self._context, **run)
        try:
            yield decoding
        finally:
            self._cached = decoding.token_ids[: self._context.lengths[0]]
            self.stats = decoding.stats

    def _end_turn(self) -> None:
        while True:
            if self._is_closing:
                if self._context is not None:
                    self._context.close()
                self._context, self._cached, self._is_closing = None, [], False
            self._turn.release()
            # `close` may have been called since the check, and have found the lock still held.
            if not (self._is_closing and self._turn.acquire(blocking=False)):
                return

    def _num_shared(self, prompt: list[int]) -> int:
        """Return how many tokens at the start of the prompt, without its last token, are cached."""
        pairs = zip(self._cached, prompt[:-1], strict=False)
        differing = (index for index, (cached, token) in enumerate(pairs) if cached != token)
        return next(differing, min(len(self._cached), len(prompt) - 1))
