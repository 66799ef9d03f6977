"""Settings of the levels of a draft tree."""

from typing import Literal

from pydantic import Field

from jakiro.utils.settings import Settings

ParallelHeads = Literal["experts", "branch", "masks"]


class ScheduleSettings(Settings):
    """Depth of the draft tree."""

    autoregressive_levels: int = Field(2, ge=1, le=16)
    """Number of levels that need one pass of the trunk each; in training, also the greatest
    distance from a position to its anchor, the last verified position before it."""
    parallel_levels: int = Field(1, ge=0, le=7)
    """Number of further levels, all predicted by the last pass of the trunk."""
    parallel_heads: ParallelHeads = "experts"
    """Networks that predict the parallel levels. experts: the experts, with separate output
    matrices. branch: one network per level, as wide as an expert, which reads the last two tokens
    of a path with their features, as in Gumiho. branch requires a trunk that reads features, and an
    experts.output_norm other than feedback. masks: trunk and experts themselves, which read one
    trained mask per level in place of the token that is not drafted yet, as in ParallelSpec. masks
    requires trunk.tokens single, a trunk.num_layers of at least 1, and experts.active_experts
    null."""

    @property
    def heads(self) -> ParallelHeads | None:
        """The networks that predict the parallel levels; None if there are no such levels."""
        return self.parallel_heads if self.parallel_levels else None

    @property
    def depth(self) -> int:
        """The length of the longest path of a draft tree, in tokens."""
        return self.autoregressive_levels + self.parallel_levels
