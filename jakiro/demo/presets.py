"""Presets of the demo with a toy target: `smoke` checks that it runs, `small` shows a speed-up."""

from pydantic import PositiveFloat, PositiveInt

from jakiro.utils.settings import Settings


class TargetRecipe(Settings):
    """Settings that, together with the corpus, determine the toy target.

    Attributes:
        vocab_size: size of the tokenizer's vocabulary.
        num_layers: number of layers.
        hidden_size: width of hidden states.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads.
        head_dim: size of one head.
        intermediate_size: inner width of the feed-forward part.
        max_position: number of positions of the model.
        max_training_characters: largest number of characters of training text, which consists of
            whole files; None for no limit.
        sequence_length: number of predicted tokens per training sequence.
        sequences_per_step: number of sequences per optimizer step.
        num_steps: number of optimizer steps.
        warmup_steps: number of steps during which the learning rates rise to their peak.
        decay_share: fraction of the steps, at the end of the training, during which the learning
            rates fall to zero.
        muon_lr: peak learning rate of the weight matrices of the layers.
        adam_lr: peak learning rate of the embedding and the norms.
        num_validation_sequences: largest number of test sequences for the reported loss.
        seed: seed of the initial weights and the order of the data.
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
    sequence_length: PositiveInt = 256
    sequences_per_step: PositiveInt
    num_steps: PositiveInt
    warmup_steps: PositiveInt = 20
    decay_share: PositiveFloat = 0.5
    muon_lr: PositiveFloat = 0.015
    adam_lr: PositiveFloat = 0.02
    num_validation_sequences: PositiveInt = 200
    seed: int = 0


class TextRecipe(Settings):
    """Amount of text to train the drafter on: library files, and texts that the target continues.

    Attributes:
        num_files: number of library files.
        num_batches: number of batches of continuations; every other batch is decoded greedily.
        batch: number of continuations per batch.
        start_tokens: number of tokens of library source before each continuation.
        new_tokens: number of tokens per continuation.
        temperature: sampling temperature of the batches that are not greedy.
    """

    num_files: PositiveInt
    num_batches: PositiveInt
    batch: PositiveInt = 64
    start_tokens: PositiveInt = 48
    new_tokens: PositiveInt = 208
    temperature: float = 0.9


class DrafterRecipe(Settings):
    """Settings of the drafter's training.

    Attributes:
        steps: number of optimizer steps.
        batch_size: number of sequences of 256 tokens per optimizer step.
        learning_rate: peak learning rate.
    """

    steps: PositiveInt
    batch_size: PositiveInt = 4
    learning_rate: PositiveFloat = 0.02


class Preset(Settings):
    """One size of the demo.

    Attributes:
        name: name of the preset on the command line.
        target: recipe of the toy target.
        texts: amount of text to train the drafter on.
        drafter: settings of the drafter's training.
        num_tree_prompts: number of prompts from dev files that the draft trees are selected on.
        num_prompts: number of prompts from test files that results are reported on.
        max_new_tokens: number of tokens that are generated per prompt.
    """

    name: str
    target: TargetRecipe
    texts: TextRecipe
    drafter: DrafterRecipe
    num_tree_prompts: PositiveInt
    num_prompts: PositiveInt
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
        sequences_per_step=4,
        num_steps=150,
        num_validation_sequences=40,
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
        sequences_per_step=4,
        num_steps=1250,
    ),
    texts=TextRecipe(num_files=200, num_batches=8),
    drafter=DrafterRecipe(steps=850),
    num_tree_prompts=4,
    num_prompts=10,
    max_new_tokens=64,
)
PRESETS = {preset.name: preset for preset in (_SMOKE, _SMALL)}
