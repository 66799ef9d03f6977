"""Where a drafter's weights start, and which of them are trained."""

from typing import Literal

from pydantic import Field, NonNegativeInt, model_validator

from jakiro.settings import Settings


class InitializeSettings(Settings):
    """Where the drafter's weights start, see `training.initialization`.

    Attributes:
        attention_layer: the layer of the target, negative from the end, at whose attention weights
            the trunk's attention starts, for which the trunk needs that layer's heads; "auto" for
            the one in whose place the drafter stands, the last before `drafter.tail_layers`, if it
            can be, else and with None at random.
        fit_tokens: of the training data, on which a drafter that reads features, and whose
            attention starts at the layer in whose place it stands, is fitted in closed form to
            start as that layer as a whole (`training.layer_fit`); 0: only its attention does.
        drafter: folder or hub id of a drafter of the same settings at whose weights this one
            starts, with its table of drafted tokens; step and optimizer are those of a new run.
    """

    attention_layer: int | Literal["auto"] | None = "auto"
    fit_tokens: NonNegativeInt = 32_768
    drafter: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _starts_at_one_place(self) -> "InitializeSettings":
        if isinstance(self.attention_layer, int) and self.drafter is not None:
            raise ValueError("attention_layer or drafter, not both")
        return self


class LoraSettings(Settings):
    """Low-rank adapters beside frozen weights (arXiv 2106.09685), see `training.adapters`.

    Attributes:
        rank: of the product that is added to each adapted matrix.
        alpha: the product is scaled by alpha / rank.
        targets: names of linear layers or stacks of matrices in the drafter, or their ends, such as
            `self_attention.project` or `bank.down`; None for all but the router.
    """

    rank: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    targets: tuple[str, ...] | None = Field(None, min_length=1)
