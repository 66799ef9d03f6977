"""Settings of the levels of a draft tree."""

from collections.abc import Container
from functools import reduce
from typing import Literal

from pydantic import Field

from jakiro.utils.settings import Settings

ParallelHeads = Literal["experts", "branch", "masks", "transfer"]

# The values of other settings of a drafter that networks of parallel levels require.
_REQUIRED: dict[ParallelHeads, dict[str, Container[object]]] = {
    "experts": {},
    "branch": {"trunk.kind": ("feedback", "hybrid"), "experts.output_norm": ("none", "head")},
    "masks": {
        "trunk.tokens": ("single",),
        "trunk.num_layers": range(1, 5),
        "experts.active_experts": (None,),
    },
    "transfer": {
        "schedule.autoregressive_levels": (1,),
        "schedule.parallel_levels": range(1, 8),
        "tail_layers": range(1, 1000),
        "experts.num_experts": (1,),
        "experts.combine": ("sum",),
        "trunk.kind": ("feedback",),
        "trunk.num_layers": (0,),
        "trunk.input": ("wide",),
        "trunk.residual": ("feature",),
        "trunk.input_norms": (False,),
        "trunk.fusion_layers": (None,),
        "trunk.tokens": ("single",),
        "trunk.mlp_width": (None,),
        "trunk.ttt_steps": (1,),
    },
}


class ScheduleSettings(Settings):
    """Depth of the draft tree."""

    autoregressive_levels: int = Field(4, ge=1, le=16)
    """Number of levels that need one pass of the trunk each; in training, also the greatest
    distance from a position to its anchor, the last verified position before it."""
    parallel_levels: int = Field(0, ge=0, le=7)
    """Number of further levels, all predicted by the last pass of the trunk."""
    parallel_heads: ParallelHeads = "experts"
    """Networks that predict the parallel levels. experts: the experts, with separate output
    matrices. branch: one network per level, as wide as an expert, which reads the last two tokens
    of a path with their features, as in Gumiho. branch requires a trunk that reads features, and an
    experts.output_norm other than feedback. masks: trunk and experts themselves, which read one
    trained mask per level in place of the token that is not drafted yet, as in ParallelSpec. masks
    requires trunk.tokens single, a trunk.num_layers of at least 1, and experts.active_experts
    null. transfer: one matrix per level instead of trunk and experts, and then tail_layers of the
    target, as in Hidden Transfer; the matrices read the input of these layers at the last verified
    token. transfer requires the other settings of `configs/drafters/hidden-transfer.yaml`, except
    for parallel_levels and tail_layers; there is one pass, because the states after these layers
    are not those that the matrices read."""

    @property
    def heads(self) -> ParallelHeads | None:
        """The networks that predict the parallel levels; None if there are no such levels."""
        return self.parallel_heads if self.parallel_levels else None

    def check(self, drafter: Settings) -> None:
        """Raise an error unless the networks of parallel levels fit the other settings."""
        for name, allowed in _REQUIRED[self.parallel_heads].items():
            if reduce(getattr, name.split("."), drafter) not in allowed:
                raise ValueError(
                    f"schedule.parallel_heads={self.parallel_heads} requires {name} "
                    + _words(allowed)
                )

    @property
    def depth(self) -> int:
        """The length of the longest path of a draft tree, in tokens."""
        return self.autoregressive_levels + self.parallel_levels


def _words(allowed: Container[object]) -> str:
    if isinstance(allowed, range):
        return f"of at least {allowed.start}"
    assert isinstance(allowed, tuple)
    return " or ".join("null" if value is None else str(value).lower() for value in allowed)
