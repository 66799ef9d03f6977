"""What a training run reads: the target, data, features of both, and batches of them."""

from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, NonNegativeInt, model_validator

from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings
from training.loss.anchors import Anchors

Precision = Literal["fp32", "bf16", "fp16"]
FeatureDtype = Literal["fp32", "bf16"]

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TargetSettings(Settings):
    """The frozen target.

    Attributes:
        name_or_path: a folder or hub id of a causal LM with its tokenizer.
        dtype: what the target computes in.
    """

    name_or_path: str = Field(min_length=1)
    dtype: Precision = "fp32"


class DataSettings(Settings):
    """What to train on, see `training.data`.

    Attributes:
        paths: JSON, JSONL or Parquet files, folders of them, or data sets of the hub as `name` or
            `name:split`.
        sequence_length: tokens of a packed row; longer documents are split.
        split: other documents that are split, too, where more than a twentieth of rows would be
            padding: "texts" for plain texts, "all" for conversations as well, or "never". A later
            piece begins in mid-document, without the tokenizer's first token, and remembers nothing
            of what came before it.
        held_out: rows of data, such as conversations, kept out of training to measure on.
        skip_bad_rows: leave out rows that cannot be used, and count them; by default the first one
            ends the run.
        share: of the other rows, those to train on; a smaller share is part of a larger one.
        cache_folder: where tokens are kept between runs; None for the user's cache.
    """

    paths: tuple[str, ...] = Field(min_length=1)
    sequence_length: int = Field(512, ge=2)
    split: Literal["never", "texts", "all"] = "texts"
    validation_size: int = Field(0, ge=0)
    skip_bad_rows: bool = False
    fraction: float = Field(1.0, gt=0, le=1)
    cache_folder: Path | None = None

    def check_context(self, max_position: int) -> None:
        """Refuse rows that are longer than the target's context of so many tokens.

        Raises:
            ConfigError: they are.
        """
        if self.sequence_length > max_position:
            raise ConfigError(
                "data.sequence_length is longer than the target's context",
                expected=f"at most {max_position}",
                got=self.sequence_length,
                remedy="lower data.sequence_length: longer documents are split",
            )


class TargetStateSettings(Settings):
    """Where the target's side of the training rows comes from, see `training.target_states`.

    Attributes:
        source: "online" runs the target beside the drafter; "offline" reads what `jakiro features`
            has written, and the target's layers never run in a step.
        folder: of the shards to be read.
        dtype: what shards are kept in; "fp32" repeats online training bit by bit.
    """

    source: Literal["online", "offline"] = "online"
    folder: Path | None = None
    dtype: FeatureDtype = "bf16"

    @model_validator(mode="after")
    def _offline_has_a_folder(self) -> "TargetStateSettings":
        if self.source == "offline" and self.folder is None:
            raise ValueError("target_states.folder with target_states.source offline")
        return self


class BatchSettings(Settings):
    """What one optimizer step sees; the same for any number of processes.

    Attributes:
        rows: packed rows of a step, over all processes.
        micro_batch: rows that a process reads at a time; it decides memory, not the result.
        draws: times that anchors are drawn for a row; all share one forward of the target.
        anchors: where verification is taken to have ended: "drafting", at distances that occur when
            drafting; "blocks", the same for several positions in a row, which with
            `drafter.tail_layers` is what "drafting" means; or "previous", always at the token
            before, which is not how drafts are made.
        curriculum: share of the steps, the first ones, in which self-attention sees drafted tokens
            only (arXiv 2410.03804).

    A trunk that reads features has `trunk.ttt_steps` instead of the last three.
    """

    global_batch_size: int = Field(8, ge=1)
    micro_batch_size: int = Field(8, ge=1)
    anchor_samples: int = Field(1, ge=1, le=8)
    anchors: Anchors = "drafting"
    curriculum_fraction: float = Field(0.0, ge=0, le=1)

    def accumulation(self, num_processes: int) -> int:
        """Return how many micro-batches each process reads per step.

        Raises:
            ConfigError: the rows cannot be shared out evenly.
        """
        if self.global_batch_size % (self.micro_batch_size * num_processes):
            raise ConfigError(
                "batch.global_batch_size cannot be shared out evenly",
                expected=f"a multiple of batch.micro_batch_size ({self.micro_batch_size}) times the "
                f"number of processes ({num_processes})",
                got=self.global_batch_size,
                remedy="change batch.global_batch_size or batch.micro_batch_size",
            )
        return self.global_batch_size // (self.micro_batch_size * num_processes)


class InitializeSettings(Settings):
    """Where the drafter's weights start, see `training.setup.initialization`.

    Attributes:
        attention_layer: the layer of the target, negative from the end, at whose attention weights
            the trunk's attention starts, for which the trunk needs that layer's heads; "auto" for
            the one in whose place the drafter stands, the last before `drafter.tail_layers`, if it
            can be, else and with None at random.
        fit_tokens: of the training data, on which a drafter that reads features, and whose
            attention starts at the layer in whose place it stands, is fitted in closed form to
            start as that layer as a whole (`training.setup.layer_fit`); 0: only its attention does.
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
    """Low-rank adapters beside frozen weights (arXiv 2106.09685), see `training.setup.adapters`.

    Attributes:
        rank: of the product that is added to each adapted matrix.
        alpha: the product is scaled by alpha / rank.
        targets: names of linear layers or stacks of matrices in the drafter, or their ends, such as
            `self_attention.project` or `bank.down`; None for all but the router.
    """

    rank: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    targets: tuple[str, ...] | None = Field(None, min_length=1)
