"""The callback through which long work reports its progress."""

from collections.abc import Callable

# Function that receives the name and the number of steps of a part of the work, and returns a
# function that is called after each step.
Track = Callable[[str, int], Callable[[], None]]


def untracked(description: str, total: int) -> Callable[[], None]:
    """Return a function that does nothing; a `Track` for work whose progress is not shown.

    Args:
        description: name of the part, which is ignored.
        total: number of steps, which is ignored.
    """
    return lambda: None
