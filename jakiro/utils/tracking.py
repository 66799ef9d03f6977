"""The callback through which long work reports its progress."""

from collections.abc import Callable

# Function that receives the name and the number of steps of a part of the work (None if it is
# unknown), and returns a function that is called after each step.
Track = Callable[[str, int | None], Callable[[], None]]


def untracked(description: str, total: int | None) -> Callable[[], None]:
    """Return a function that does nothing; a `Track` for work whose progress is not shown."""
    return lambda: None
