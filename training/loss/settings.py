"""Settings of the training objective, which are read and checked without torch."""

from typing import Literal

from pydantic import Field, model_validator

from jakiro.utils.settings import Settings

# Logits that are divided by this temperature are still finite in float32.
_LEAST_TEMPERATURE = 0.001

TokenLoss = Literal["cross_entropy", "kl", "reverse_kl", "total_variation", "ce_tv", "lk_hybrid"]
LevelWeights = Literal["decay", "dpace"]


class ObjectiveSettings(Settings):
    """Weights of the loss terms of arXiv 2502.06282 and of this project's contrastive loss."""

    token_weight: float = Field(0.1, ge=0)
    """Weight of the token loss, a distance between draft distribution and target distribution."""
    token_loss: TokenLoss = "cross_entropy"
    """Measure of the distance between draft distribution and target distribution; kl has the same
    gradients as cross_entropy. ce_tv is 0.1 cross_entropy + 0.9 total_variation, as in DSpark
    (arXiv 2607.05147). lk_hybrid (arXiv 2602.23881) moves from kl to total_variation, the more the
    draft distribution overlaps with the target's."""
    token_temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Temperature of both distributions in the token loss, such as the temperature at which the
    drafter will be used. At 0, the draft distribution at temperature 1 learns the target's most
    likely token. Lower positive temperatures have larger gradients, so token_weight may have to be
    smaller."""
    multiple_choice_weight: float = Field(0.0, ge=0)
    """Weight of the multiple-choice loss: at each position, the expert that gives the next token of
    the text the highest probability learns this token, weighted by the router, and the other
    experts learn nothing from it. Requires drafter.experts.combine mixture."""
    feature_weight: float = Field(1.0, ge=0)
    """Weight of the regression loss on the target's features; with this loss, training needs fewer
    tokens than with the token loss alone."""
    contrast_weight: float = Field(0.0, ge=0)
    """Weight of the contrastive loss, which trains the drafter to distinguish the right target
    feature from those of other positions."""
    balance_weight: float = Field(0.01, ge=0)
    """Weight of the loss that balances the load of the experts."""
    level_weights: LevelWeights = "decay"
    """How the losses of tokens are weighted by level: decay has the constants parallel_weight and
    level_decay; with dpace (arXiv 2605.18810), a level has more weight the more probable the draft
    makes the tokens of the text up to it, and the more levels follow. Features and their contrast
    always have the constants."""
    parallel_weight: float = Field(0.5, ge=0)
    """Weight of the losses of each parallel level, relative to the losses of the autoregressive
    level."""
    level_decay: float = Field(1.0, gt=0, le=1)
    """Factor by which each additional parallel level multiplies the weight of the losses of a
    level."""
    distance_decay: float = Field(1.0, gt=0, le=1)
    """Factor by which each additional token of distance from the anchor (the last verified token)
    multiplies the weight of a position."""
    accepted_length_weight: float = Field(0.0, ge=0)
    """Weight of the expected accepted length of the drafted tree, which is maximized. The length is
    that of the tree's longest path that agrees with the text, if accepted_length_children
    candidates below each node are sampled from the draft distribution. A path has as many tokens as
    there are passes in training (trunk.ttt_steps; for a moa trunk, one) and parallel levels."""
    accepted_length_children: int = Field(4, ge=1)
    """Number of candidates below each node for accepted_length_weight."""
    contrast_temperature: float = Field(0.1, gt=0, allow_inf_nan=False)
    """Temperature of the contrastive loss."""
    chunk_size: int = Field(256, ge=1)
    """Number of positions whose distributions over the vocabulary are in memory at once; affects
    memory use, but not the result."""

    @model_validator(mode="after")
    def _loss_is_finite(self) -> "ObjectiveSettings":
        if self.token_loss == "reverse_kl" and self.token_temperature == 0:
            raise ValueError(
                "objective.token_temperature above 0 when objective.token_loss is reverse_kl"
            )
        if 0 < self.token_temperature < _LEAST_TEMPERATURE:
            raise ValueError(f"objective.token_temperature 0 or at least {_LEAST_TEMPERATURE}")
        return self
