"""A dialogue that is not read anew with every turn."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from inference.engine.context import Context
from inference.engine.loop import DecodeRun
from inference.engine.request import Request
from jakiro.errors import PromptError


class Conversation:
    """What target and drafter remember between turns.

    Each turn's prompt is a whole prompt; of what it shares with what was read and written before,
    nothing is read again. The tokens are those of a fresh start.

    One turn at a time: a conversation must not be shared by threads.
    """

    def __init__(self) -> None:
        self._context: Context | None = None
        self._cached: list[int] = []  # the tokens whose rows are in the cache

    def __enter__(self) -> "Conversation":
        """Return the conversation, which is closed at the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Free the caches."""
        self.close()

    @property
    def num_cached(self) -> int:
        """Tokens that the next turn need not read again, if its prompt begins with them."""
        return len(self._cached)

    def close(self) -> None:
        """Free the caches; a later turn starts anew."""
        if self._context is not None:
            self._context.close()
        self._context, self._cached = None, []

    @contextmanager
    def turn(self, request: Request, **run: Any) -> Iterator[DecodeRun]:
        """Decode a request with what is remembered, and remember its end.

        Args:
            request: with a whole prompt.
            **run: further arguments of `DecodeRun`.

        Raises:
            PromptError: the conversation was begun with another decoder.
        """
        target, drafter = run["target"], run["drafter"]
        if self._context is None:
            self._context = Context(target, drafter, request.sampling, 1, request.max_length)
        if self._context.target is not target or self._context.drafter is not drafter:
            raise PromptError(
                "the conversation was begun with another decoder",
                expected="all turns with the same one",
                got="another target or drafter",
                remedy="close() the conversation, or begin a new one",
            )
        self._context.rollback(self._num_shared(request.token_ids))
        if self._context.session is not None:
            self._context.session.set_sampling(request.sampling)
        decoding = DecodeRun(requests=request, context=self._context, **run)
        try:
            yield decoding
        finally:
            self._cached = decoding.token_ids[: self._context.lengths[0]]

    def _num_shared(self, prompt: list[int]) -> int:
        """Return how many cached tokens the prompt begins with; its last one is always read."""
        pairs = zip(self._cached, prompt[:-1], strict=False)
        differing = (place for place, (one, other) in enumerate(pairs) if one != other)
        return next(differing, min(len(self._cached), len(prompt) - 1))
