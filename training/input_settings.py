"""The settings of a training run's inputs: target, data, target states, batches, and weights."""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, model_validator

from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings
from training.loss.anchors import Anchors

Precision = Literal["fp32", "bf16", "fp16"]
TargetStateDtype = Literal["fp32", "bf16"]


class TargetSettings(Settings):
    """The frozen target."""

    name_or_path: str = Field(min_length=1)
    """Folder or hub id of a causal language model with its tokenizer."""
    dtype: Precision = "fp32"
    """Precision in which the target computes."""


class DataSettings(Settings):
    """The training data, see `training.data`."""

    paths: tuple[str, ...] = Field(min_length=1)
    """JSON, JSONL or Parquet files, folders of them, or data sets of the hub as NAME or NAME:SPLIT.
    Records are {"text": ...}, {"messages": [{"role": ..., "content": ...}]}, {"conversations":
    [{"from": ..., "value": ...}]} or {"input_ids": [...], "loss_mask": [...]}."""
    sequence_length: int = Field(512, ge=2)
    """Tokens of a packed sequence; longer documents are split."""
    split: Literal["never", "texts", "all"] = "texts"
    """Shorter documents that are split as well, if more than 5% of the positions would be padding:
    plain texts, all of them, or none. A later piece starts in mid-document without the tokenizer's
    first token, and without what came before it."""
    validation_size: int = Field(0, ge=0)
    """Records, such as conversations, that are kept out of training to measure on."""
    skip_bad_rows: bool = False
    """Skip records that cannot be used, and count them; false: the first one ends the run."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Fraction of the other records to train on; a smaller fraction is a subset of a larger one."""
    cache_folder: Path | None = None
    """Where tokens are cached between runs; null: the user's cache folder."""

    def check_context(self, max_position: int) -> None:
        """Refuse sequences that are longer than the target's context of `max_position` tokens.

        Raises:
            ConfigError: sequences are too long.
        """
        if self.sequence_length > max_position:
            raise ConfigError(
                "data.sequence_length is longer than the target's context",
                expected=f"at most {max_position}",
                got=self.sequence_length,
                remedy="lower data.sequence_length: longer documents are split",
            )


class TargetStateSettings(Settings):
    """The source of the target's hidden states, keys and values, see `training.target_states`."""

    source: Literal["online", "offline"] = "online"
    """online: the target runs beside the drafter. offline: states are read that `jakiro features`
    has written."""
    folder: Path | None = None
    """Folder of the stored states; needed with offline."""
    dtype: TargetStateDtype = "bf16"
    """Precision of the stored states; fp32 repeats online training bit for bit."""

    @model_validator(mode="after")
    def _offline_has_a_folder(self) -> "TargetStateSettings":
        if self.source == "offline" and self.folder is None:
            raise ValueError("target_states.folder with target_states.source offline")
        return self


class BatchSettings(Settings):
    """The batch of one optimizer step; the same for any number of processes.

    `anchor_samples`, `anchors` and `curriculum_fraction` apply to a trunk that does not read
    features; a trunk that reads features has `drafter.trunk.ttt_steps` instead.
    """

    global_batch_size: int = Field(8, ge=1)
    """Packed sequences of an optimizer step, over all processes."""
    micro_batch_size: int = Field(8, ge=1)
    """Packed sequences that a process reads at a time; decides memory, not the result."""
    anchor_samples: int = Field(1, ge=1, le=8)
    """For moa: number of anchors of each position; all of them share one target forward."""
    anchors: Anchors = "drafting"
    """For moa: how anchors are chosen. drafting: at the distances that occur in drafting. blocks:
    the same, but neighbouring positions share an anchor, which tail_layers needs. previous: always
    the previous position, unlike drafting."""
    curriculum_fraction: float = Field(0.0, ge=0, le=1)
    """For moa: fraction of the steps, at the start, in which self-attention sees drafted tokens
    only (arXiv 2410.03804)."""

    def accumulation(self, num_processes: int) -> int:
        """Return the number of micro-batches that each process reads per optimizer step.

        Raises:
            ConfigError: the sequences cannot be shared out evenly.
        """
        if self.global_batch_size % (self.micro_batch_size * num_processes):
            raise ConfigError(
                "batch.global_batch_size cannot be shared out evenly",
                expected=f"a multiple of batch.micro_batch_size ({self.micro_batch_size}) times "
                f"the number of processes ({num_processes})",
                got=self.global_batch_size,
                remedy="change batch.global_batch_size or batch.micro_batch_size",
            )
        return self.global_batch_size // (self.micro_batch_size * num_processes)


class InitializeSettings(Settings):
    """The start of the drafter's weights, see `training.setup.initialization`."""

    attention_layer: int | Literal["auto"] | None = "auto"
    """Target layer from whose attention the trunk's attention is initialised (-1: the last);
    drafter.trunk must have that layer's heads. auto: the last one before tail_layers, or random if
    its weights do not fit. null: random."""
    fit_tokens: NonNegativeInt = 32_768
    """Training tokens on which a trunk that reads features is fitted in closed form, before any
    step, to act as that target layer as a whole, feed-forward part included; 0: only its attention
    is initialised."""
    drafter: str | None = Field(None, min_length=1)
    """Folder or hub id of a drafter of the same settings whose weights and draft vocabulary are the
    start (warm start); step and optimizer are those of a new run. null: none."""

    @model_validator(mode="after")
    def _has_one_start(self) -> "InitializeSettings":
        if isinstance(self.attention_layer, int) and self.drafter is not None:
            raise ValueError("attention_layer or drafter, not both")
        return self


class LoraSettings(Settings):
    """Low-rank adapters beside frozen weights (arXiv 2106.09685), see `training.setup.adapters`."""

    rank: int = Field(16, ge=1)
    """Rank of the product that is added to each adapted matrix."""
    alpha: int = Field(32, ge=1)
    """The product is scaled by alpha / rank."""
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of the adapted matrices in the drafter, or ends of names such as
    self_attention.project; null: all but the router's."""
