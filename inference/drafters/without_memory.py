"""What drafters have in common that read nothing of the target but its tokens."""

from jaxtyping import Int
from torch import Tensor

from inference.protocol import MemoryRows
from inference.turns import Turns
from jakiro.target import StepOutput


class WithoutMemory:
    """A drafter that needs nothing of the target's state, and learns nothing from requests."""

    needs: frozenset[str] = frozenset()
    hidden_states: tuple[int, ...] = ()
    turns: Turns | None = None

    def encode(
        self, output: StepOutput, rows: Int[Tensor, "batch rows"] | None = None
    ) -> MemoryRows:
        """Never asked, because `needs` is empty.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{type(self).__name__} reads tokens alone and has no memory")

    def reset(self) -> None:
        """Forget what was learnt from requests: nothing."""
