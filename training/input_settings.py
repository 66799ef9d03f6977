"""The settings of a run's inputs: target, data, batches, initial weights and adapters."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, model_validator

from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings
from jakiro.utils.wording import short_dtype
from training.loss.anchors import Anchors

# Torch's names, such as bfloat16, are accepted as well.
Precision = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(short_dtype)]
TargetStateDtype = Annotated[Literal["fp32", "bf16"], BeforeValidator(short_dtype)]


class TargetSettings(Settings):
    """The frozen target."""

    name_or_path: str = Field(min_length=1)
    """Folder or hub id of a causal language model with its tokenizer."""
    dtype: Precision = "fp32"
    """Precision of the target's computations."""


class DataSettings(Settings):
    """The training data; see `training.data`."""

    paths: tuple[str, ...] = Field(min_length=1)
    """JSON, JSONL or Parquet files, folders of such files, or datasets of the hub as NAME or
    NAME:SPLIT. A record is {"text": ...}, {"messages": [{"role": ..., "content": ...}]},
    {"conversations": [{"from": ..., "value": ...}]} or {"input_ids": [...], "loss_mask": [...]}."""
    sequence_length: int = Field(512, ge=2)
    """Length of a packed sequence, in tokens; longer documents are split."""
    split: Literal["never", "texts", "all", "alone"] = "texts"
    """Documents that fit into a sequence are kept whole unless more than 5% of the positions would
    then be padding. In that case, this setting names the kinds of documents that may be split: none
    (never), plain texts, or all. Each piece after the first starts in the middle of its document,
    without the preceding text and without the token with which the tokenizer begins a text (such as
    BOS). alone: each document has sequences of its own, which a target with recurrent layers needs.
    """
    validation_size: int = Field(0, ge=0)
    """Number of records, such as conversations, that are held out of training for evaluation."""
    skip_bad_records: bool = False
    """Skip and count the records that cannot be used; false: stop at the first such record."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Fraction of the records to train on, after the held-out records are removed; the records of a
    smaller fraction are a subset of those of a larger fraction."""
    cache_folder: Path | None = None
    """Folder in which tokens are cached between runs; null: the user's cache folder."""

    def check_context(self, max_position: int) -> None:
        """Raise an error if sequences exceed the target's context of `max_position` tokens."""
        if self.sequence_length > max_position:
            raise ConfigError(
                "data.sequence_length is longer than the target's context",
                expected=f"at most {max_position}",
                got=self.sequence_length,
                remedy="lower data.sequence_length; longer documents will be split",
            )


class TargetStateSettings(Settings):
    """The source of the target's hidden states, keys and values; see `training.target_states`."""

    source: Literal["online", "offline", "available"] = "online"
    """online: the target runs during training. offline: the run reads states that
    `jakiro prepare states` has written. available: as offline if the folder has all states that the
    drafter reads, otherwise as online, so that the arms of a study can share hidden states."""
    folder: Path | None = None
    """Folder of the stored states; required unless the source is online."""
    dtype: TargetStateDtype = "bf16"
    """Precision of the stored states; with fp32, training gives bit for bit the same result as
    with online states, or the same up to rounding if the drafter has a draft vocabulary."""

    @model_validator(mode="after")
    def _offline_has_a_folder(self) -> "TargetStateSettings":
        if self.source != "online" and self.folder is None:
            raise ValueError(f"a target_states.folder when target_states.source is {self.source}")
        return self


class BatchSettings(Settings):
    """The batch of one optimizer step; the same for any number of processes.

    `anchor_samples`, `anchors`, `far_anchors` and `curriculum_fraction` apply only to a moa trunk.
    Trunks of kind feedback and hybrid use `drafter.trunk.ttt_steps` instead.
    """

    global_batch_size: int = Field(8, ge=1)
    """Number of packed sequences in an optimizer step, over all processes."""
    micro_batch_size: int = Field(8, ge=1)
    """Number of packed sequences that a process reads at a time. This number affects memory use and
    speed, but not the batch of an optimizer step."""
    anchor_samples: int = Field(1, ge=1, le=8)
    """For a moa trunk: number of anchors sampled for each position; all of them share one forward
    pass of the target."""
    anchors: Anchors = "drafting"
    """For a moa trunk: rule that chooses anchors. The anchor of a position is the last position
    before it that counts as verified. drafting: each position has its own random distance from its
    anchor, mostly a distance that also occurs in decoding. blocks: neighboring positions share an
    anchor, which tail_layers requires; the distances are similar. previous: the anchor is always
    the preceding position, as in ordinary teacher forcing."""
    far_anchors: float = Field(0.0, ge=0, le=1)
    """For a moa trunk: share of the documents in which all positions after the beginning of the
    response, or after a random position, have this position as their anchor. Such a drafter learns
    to write many tokens without the target, as for `jakiro connect --offline write`."""
    block_roots: int | None = Field(128, ge=1)
    """For a block trunk: largest number of positions of a packed sequence from which blocks are
    drafted, chosen at random in each epoch. null: all positions, which takes more time and
    memory."""
    curriculum_fraction: float = Field(0.0, ge=0, le=1)
    """For a moa trunk: fraction of the steps, at the start of training, in which self-attention
    attends to drafted tokens only (arXiv 2410.03804)."""

    def accumulation(self, num_processes: int) -> int:
        """Return the number of micro-batches that each process reads per optimizer step."""
        if self.global_batch_size % (self.micro_batch_size * num_processes):
            raise ConfigError(
                "batch.global_batch_size cannot be divided evenly",
                expected=f"a multiple of batch.micro_batch_size ({self.micro_batch_size}) times "
                f"the number of processes ({num_processes})",
                got=self.global_batch_size,
                remedy="change batch.global_batch_size or batch.micro_batch_size, or pass "
                "--micro-batch-size auto",
            )
        return self.global_batch_size // (self.micro_batch_size * num_processes)


class InitializeSettings(Settings):
    """The drafter's initial weights; see `training.setup.initialization`."""

    attention_layer: int | Literal["auto"] | None = "auto"
    """Target layer whose attention initializes the trunk's attention (-1: the last layer);
    drafter.trunk must have as many heads, of the same size, as that layer. auto: the last layer
    before tail_layers, or random weights if that layer's weights do not fit. null: random
    weights."""
    fit_tokens: NonNegativeInt = 32_768
    """For a trunk that reads features: number of training tokens for a least-squares fit before the
    first step. With this fit, the drafter initially approximates the whole layer that
    attention_layer selects, including the layer's feed-forward part. There is no fit if
    attention_layer is null or names a layer other than the last one before tail_layers. 0:
    initialize only the trunk's attention."""
    memory: Literal["random", "target_layer"] = "random"
    """Start of memory. random: random weights, and with a fit, cross-attention adds nothing at
    first. target_layer: cross-attention starts as the attention of the layer that attention_layer
    selects, over this layer's own keys and values at verified positions; with a fit,
    self-attention adds nothing at first. This requires drafter.memory.source hidden, with
    layer_attention false, no common_width, and the layer's input (the hidden state with the
    layer's index) among drafter.memory.layers."""
    drafter: str | None = Field(None, min_length=1)
    """Folder or hub id of a drafter that was trained with the same drafter settings, except that
    schedule.autoregressive_levels and trunk.ttt_steps may differ. The run starts with the weights
    and the draft vocabulary of that drafter (warm start), but at step 0 and with a new optimizer
    state. null: no warm start."""

    @model_validator(mode="after")
    def _has_one_start(self) -> "InitializeSettings":
        if isinstance(self.attention_layer, int) and self.drafter is not None:
            raise ValueError("either attention_layer or drafter, not both")
        if self.memory == "target_layer" and self.drafter is not None:
            raise ValueError("memory random when drafter is set")
        if self.memory == "target_layer" and self.attention_layer is None:
            raise ValueError("a layer for attention_layer when memory is target_layer")
        return self


class LoraSettings(Settings):
    """Low-rank adapters of frozen weights (arXiv 2106.09685); see `training.setup.adapters`."""

    rank: int = Field(16, ge=1)
    """Rank of the product that is added to each adapted matrix."""
    alpha: int = Field(32, ge=1)
    """Scale of the adapters: the added product is multiplied by alpha / rank."""
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of the drafter's matrices to adapt, or the ends of such names, such as
    self_attention.project; null: all matrices except the router's and the experts' own matrices of
    the parallel levels, which cannot have adapters."""
