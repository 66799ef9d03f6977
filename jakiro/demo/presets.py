"""The sizes that the demo comes in: one to see that everything runs, one to see what it gains."""

from pydantic import PositiveFloat, PositiveInt

from jakiro.settings import Settings


class TargetRecipe(Settings):
    """Everything that determines the embedded target but its corpus.

    Attributes:
        max_training_characters: text to learn from, in whole files; None for all there is.
        row_tokens: tokens that a training row predicts.
        rows_per_step: rows in a batch.
        warmup_steps: steps in which the learning rates rise to their peak.
        decay_share: share of the steps, at the end, in which they fall linearly to zero.
        muon_lr: peak learning rate of the hidden matrices.
        adam_lr: peak learning rate of the embedding and the norms.
        held_out_rows: rows of the test files, evenly spread, to report the loss on.
    """

    vocab_size: PositiveInt
    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    max_position: PositiveInt = 512
    max_training_characters: PositiveInt | None = None
    row_tokens: PositiveInt = 256
    rows_per_step: PositiveInt
    num_steps: PositiveInt
    warmup_steps: PositiveInt = 20
    decay_share: PositiveFloat = 0.5
    muon_lr: PositiveFloat = 0.02
    adam_lr: PositiveFloat = 3e-3
    held_out_rows: PositiveInt = 200
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that training predicts, counted again when read again."""
        return self.num_steps * self.rows_per_step * self.row_tokens


class Preset(Settings):
    """One size of the demo."""

    name: str
    target: TargetRecipe


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="smoke",
            target=TargetRecipe(
                vocab_size=1024,
                num_layers=6,
                hidden_size=64,
                num_heads=2,
                num_kv_heads=1,
                head_dim=32,
                intermediate_size=176,
                max_training_characters=1_000_000,
                rows_per_step=4,
                num_steps=150,
                held_out_rows=40,
            ),
        ),
        Preset(
            name="small",
            target=TargetRecipe(
                vocab_size=2048,
                num_layers=12,
                hidden_size=128,
                num_heads=4,
                num_kv_heads=2,
                head_dim=32,
                intermediate_size=352,
                rows_per_step=8,
                num_steps=800,
            ),
        ),
    )
}
