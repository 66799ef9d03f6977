"""The sizes that the demo comes in: one to see that everything runs, one to see what it gains."""

from pydantic import PositiveFloat, PositiveInt

from jakiro.demo.drafting import DrafterRecipe
from jakiro.demo.texts import TextRecipe
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
    muon_lr: PositiveFloat = 0.015
    adam_lr: PositiveFloat = 0.02
    held_out_rows: PositiveInt = 200
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that training predicts, counted again when read again."""
        return self.num_steps * self.rows_per_step * self.row_tokens


class Preset(Settings):
    """One size of the demo.

    Attributes:
        texts: what the drafter learns from.
        num_tree_prompts: prompts of the dev files that the draft tree is chosen on.
        num_prompts: prompts of the test files that results are reported on.
        max_new_tokens: length of a continuation.
    """

    name: str
    target: TargetRecipe
    texts: TextRecipe
    drafter: DrafterRecipe
    num_tree_prompts: PositiveInt
    num_prompts: PositiveInt
    max_new_tokens: PositiveInt


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
            texts=TextRecipe(num_files=20, num_batches=2, batch=16),
            drafter=DrafterRecipe(steps=60),
            num_tree_prompts=2,
            num_prompts=3,
            max_new_tokens=32,
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
                rows_per_step=4,
                num_steps=1250,
            ),
            texts=TextRecipe(num_files=200, num_batches=8),
            drafter=DrafterRecipe(steps=850),
            num_tree_prompts=4,
            num_prompts=10,
            max_new_tokens=64,
        ),
    )
}
