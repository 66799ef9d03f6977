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
    """The frozen target.

    Attributes:
        name_or_path: folder or hub id of a causal LM with its tokenizer.
        dtype: dtype that the target computes in.
    """

    name_or_path: str = Field(min_length=1)
    dtype: Precision = "fp32"


class DataSettings(Settings):
    """The training data, see `training.data`.

    Attributes:
        paths: JSON, JSONL or Parquet files, folders of them, or data sets of the hub as `name` or
            `name:split`.
        sequence_length: tokens of a packed sequence; longer documents are split.
        split: documents that may also be split if more than a twentieth of the sequences would be
            padding: "texts" for texts, "all" for conversations as well, or "never". A later piece
            begins in mid-document, without the tokenizer's first token, and sees nothing of the
            pieces before it.
        validation_size: number of records, such as conversations, that are kept out of training to
            measure on.
        skip_bad_rows: whether records that cannot be used are left out and counted; by default the
            first of them ends the run.
        fraction: fraction of the other records to train on; a smaller fraction is part of a larger
            one.
        cache_folder: folder that keeps tokens between runs; None for the user's cache.
    """

    paths: tuple[str, ...] = Field(min_length=1)
    sequence_length: int = Field(512, ge=2)
    split: Literal["never", "texts", "all"] = "texts"
    validation_size: int = Field(0, ge=0)
    skip_bad_rows: bool = False
    fraction: float = Field(1.0, gt=0, le=1)
    cache_folder: Path | None = None

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
    """The source of the target's hidden states, keys and values, see `training.target_states`.

    Attributes:
        source: "online" runs the target beside the drafter; "offline" reads states that
            `jakiro features` has written, and no optimizer step runs the target's layers.
        folder: folder of the shards, which "offline" needs.
        dtype: dtype of the shards; "fp32" repeats online training bit by bit.
    """

    source: Literal["online", "offline"] = "online"
    folder: Path | None = None
    dtype: TargetStateDtype = "bf16"

    @model_validator(mode="after")
    def _offline_has_a_folder(self) -> "TargetStateSettings":
        if self.source == "offline" and self.folder is None:
            raise ValueError("target_states.folder with target_states.source offline")
        return self


class BatchSettings(Settings):
    """The batch of one optimizer step; the same for any number of processes.

    `anchor_samples`, `anchors` and `curriculum_fraction` apply to a trunk that does not read
    features; a trunk that reads features has `drafter.trunk.ttt_steps` instead.

    Attributes:
        global_batch_size: packed sequences of an optimizer step, over all processes.
        micro_batch_size: sequences that a process reads at a time; it decides memory, not the
            result.
        anchor_samples: number of anchors of each position; all share one forward of the target.
        anchors: last verified position of each position: "drafting", at distances that occur when
            drafting; "blocks", shared by several consecutive positions, as "drafting" is with
            `drafter.tail_layers`; or "previous", always the position before, which does not occur
            when several tokens are drafted.
        curriculum_fraction: fraction of the optimizer steps, from the first on, in which
            self-attention sees drafted tokens only (arXiv 2410.03804).
    """

    global_batch_size: int = Field(8, ge=1)
    micro_batch_size: int = Field(8, ge=1)
    anchor_samples: int = Field(1, ge=1, le=8)
    anchors: Anchors = "drafting"
    curriculum_fraction: float = Field(0.0, ge=0, le=1)

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
    """The start of the drafter's weights, see `training.setup.initialization`.

    Attributes:
        attention_layer: index of the target's layer whose attention weights the trunk's attention
            starts with, negative from the end; the trunk needs the heads of that layer. "auto" for
            the layer that the drafter replaces, the last before `drafter.tail_layers`, or at random
            if its weights do not fit; None for random weights.
        fit_tokens: number of training tokens for the fit in closed form that makes a drafter start
            as the whole layer it replaces (`training.setup.layer_fit`), if it reads features and
            its attention starts with that layer; 0 if only its attention starts so.
        drafter: folder or hub id of a drafter with the same settings whose weights and draft
            vocabulary this drafter starts with; the run itself is new, with a new optimizer. None
            to start without another drafter.
    """

    attention_layer: int | Literal["auto"] | None = "auto"
    fit_tokens: NonNegativeInt = 32_768
    drafter: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _has_one_start(self) -> "InitializeSettings":
        if isinstance(self.attention_layer, int) and self.drafter is not None:
            raise ValueError("attention_layer or drafter, not both")
        return self


class LoraSettings(Settings):
    """Low-rank adapters beside frozen weights (arXiv 2106.09685), see `training.setup.adapters`.

    Attributes:
        rank: rank of the product that is added to each adapted matrix.
        alpha: numerator of the product's scale, alpha / rank.
        targets: names of linear layers or stacks of matrices in the drafter, or the ends of such
            names, as `self_attention.project` or `experts.down`; None for all but the router.
    """

    rank: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    targets: tuple[str, ...] | None = Field(None, min_length=1)
