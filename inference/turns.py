"""Numbers requests, so that none shares its chance with what an earlier one has taught."""

from threading import RLock
from weakref import WeakSet


class Turns:
    """Counts the requests that teach something, from 0; threads may share it.

    Attributes:
        num_resets: how often what they have taught was forgotten.
    """

    def __init__(self) -> None:
        self.num_resets = 0
        self._next = 0
        self._under_way: WeakSet[Turn] = WeakSet()
        # A run that is garbage ends its turn wherever the collector comes, even in `take`.
        self._lock = RLock()

    def take(self) -> "Turn":
        """Return the turn of a request, whose number no other one gets until `reset`."""
        with self._lock:
            turn = Turn(self, self._next)
            self._under_way.add(turn)
            self._next += 1
            return turn

    def reset(self) -> None:
        """Begin with 0 again, once what was learnt is forgotten.

        While requests are under way, which go on to teach, numbers go on, too.
        """
        with self._lock:
            self.num_resets += 1
            if not self._under_way:
                self._next = 0

    def end(self, turn: "Turn") -> None:
        """Take note that a request teaches nothing any more."""
        with self._lock:
            self._under_way.discard(turn)


class Turn:
    """What a request, or several that are decoded together, hold while they may teach something.

    Args:
        turns: that count it.
        number: which one it is.
    """

    def __init__(self, turns: Turns, number: int) -> None:
        self.number = number
        self._turns = turns

    def end(self) -> None:
        """Teach nothing any more; a turn that is held by nothing has ended, too."""
        self._turns.end(self)
