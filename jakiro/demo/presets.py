"""The sizes that the demo comes in: one to see that everything runs, one to see what it gains."""

from pydantic import PositiveFloat, PositiveInt

from jakiro.utils.settings import Settings


class TargetRecipe(Settings):
    """Everything that determines the embedded target but its corpus."""

    vocab_size: PositiveInt
    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    max_position: PositiveInt = 512
    max_training_characters: PositiveInt | None = None  # in whole files; None for all there are
    row_tokens: PositiveInt = 256  # that a training row predicts
    rows_per_step: PositiveInt
    num_steps: PositiveInt
    warmup_steps: PositiveInt = 20  # in which the learning rates rise to their peak
    decay_share: PositiveFloat = 0.5  # of the steps; at the end the rates fall linearly to zero
    muon_lr: PositiveFloat = 0.015  # at the peak, for the hidden matrices
    adam_lr: PositiveFloat = 0.02  # at the peak, for the embedding and the norms
    held_out_rows: PositiveInt = 200  # of the test files, to report the loss on
    seed: int = 0


class TextRecipe(Settings):
    """How much text the drafter sees: library source, and the target's own continuations of it."""

    num_files: PositiveInt  # of the library, in a fixed shuffle
    num_batches: PositiveInt  # of continuations, every other one greedy
    batch: PositiveInt = 64
    start_tokens: PositiveInt = 48  # of library source, which a continuation starts from
    new_tokens: PositiveInt = 208
    temperature: float = 0.9  # of the continuations that are not greedy


class DrafterRecipe(Settings):
    """How long and how fast the drafter learns."""

    steps: PositiveInt
    rows: PositiveInt = 4  # of a step, of 256 tokens each
    learning_rate: PositiveFloat = 0.02  # at the peak


class Preset(Settings):
    """One size of the demo."""

    name: str
    target: TargetRecipe
    texts: TextRecipe
    drafter: DrafterRecipe
    num_tree_prompts: PositiveInt  # of the dev files, to choose the draft trees on
    num_prompts: PositiveInt  # of the test files, to report results on
    max_new_tokens: PositiveInt


_SMOKE = Preset(
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
)
_SMALL = Preset(
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
)
PRESETS = {preset.name: preset for preset in (_SMOKE, _SMALL)}
