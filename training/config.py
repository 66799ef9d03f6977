"""The settings of a training run."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings
from training.input_settings import (
    BatchSettings,
    DataSettings,
    InitializeSettings,
    LoraSettings,
    Precision,
    TargetSettings,
    TargetStateSettings,
)
from training.loss.anchors import AnchorRule
from training.loss.settings import ObjectiveSettings

Decay = Annotated[float, Field(ge=0, lt=1)]

_LONGEST_WARMUP = 50  # steps, with `optimizer.warmup_steps: auto`
_DEFAULT_STEPS = 1000  # if neither `steps` nor `epochs` is set
# With `evaluation.every: auto`: the number of evaluations after the first step, and the smallest
# number of trained sequences for each sequence or continuation that is measured.
_NUM_EVALUATIONS = 10
_TRAINED_PER_MEASURED = 4


class OptimizerSettings(Settings):
    """The optimizer and its learning rate over time."""

    kind: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: orthogonalized updates for hidden matrices and AdamW for the other
    parameters. With a suitable learning rate (about 0.02 on small targets, 0.005 on a chat model),
    muon needs fewer training tokens than adamw; it requires engine.zero_stage 0 and engine.dtype
    fp32."""
    learning_rate: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of AdamW's moving averages of the gradient and of the squared gradient."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, which is applied to matrices only."""
    warmup_steps: NonNegativeInt | Literal["auto"] = "auto"
    """Number of steps over which the learning rate rises linearly to its peak; auto: a tenth of the
    steps, at most 50."""
    schedule: Literal["linear", "cosine"] = "linear"
    """Shape of the learning rate's decay from its peak to the last step."""
    min_lr_ratio: float = Field(0.05, ge=0, le=1)
    """Learning rate at the last step, as a fraction of the peak."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Largest gradient norm; a gradient with a larger norm is scaled down to this norm. 0 means no
    limit."""

    def warmup_for(self, num_steps: int) -> int:
        if self.warmup_steps == "auto":
            return min(_LONGEST_WARMUP, num_steps // 10)
        return self.warmup_steps


class EngineSettings(Settings):
    """The settings of the DeepSpeed engine.

    Only `dtype` and `autocast` change the result of a run; the other settings change only memory
    use and speed.
    """

    zero_stage: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: stage 1 shards the optimizer states, stage 2 also shards the gradients, and stage
    3 also shards the parameters. In half precision, stage 1 is used instead of stage 0."""
    dtype: Precision = "fp32"
    """Precision of the drafter's computations; its master weights are always fp32."""
    autocast: bool | Literal["auto"] = "auto"
    """Multiply the matrices of an fp32 drafter in bfloat16; auto: if the GPU or the processor does
    so in hardware, which makes training about twice as fast."""
    offload_optimizer: bool = False
    """Keep the optimizer states in main memory and update the weights there. This requires a
    zero_stage of at least 1."""
    offload_parameters: bool = False
    """Keep the parameters in main memory until they are used. This requires zero_stage 3."""
    activation_checkpointing: bool = False
    """Recompute the drafter's activations in the backward pass instead of storing them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto uses a GPU if there is one."""


class EvaluationSettings(Settings):
    """Evaluation on held-out data: validation loss, and tau measured by the real decode loop.

    Evaluation does not change the weights, so a run can be resumed with different evaluation
    settings. Then `best` contains the best drafter of all evaluations that measured the same
    quantity, even if their other settings differed.
    """

    every: PositiveInt | Literal["auto"] | None = "auto"
    """Number of steps between evaluations; the first evaluation precedes the first step. auto: a
    tenth of the steps, but rarely enough that most of the time is training; null if there is
    nothing to measure, or the run is too short. null: evaluate only at the end."""
    prompts: Path | None = None
    """Prompt file in the format of `jakiro bench`, or a file of text records; only the first turn
    of a dialogue is answered. null: use the beginnings of held-out records as prompts."""
    num_prompts: int = Field(8, ge=0)
    """Number of prompts to decode; 0 means that nothing is decoded."""
    prompt_tokens: int = Field(64, ge=1)
    """Largest length, in tokens, of a prompt that is cut from a held-out text; a conversation is
    cut before its first response instead."""
    max_new_tokens: int = Field(64, ge=1)
    """Largest length of each continuation, in tokens."""
    temperatures: tuple[NonNegativeFloat, ...] = (0.0,)
    """Temperatures to decode at; 0 means greedy decoding."""
    num_sequences: int = Field(32, ge=0)
    """Largest number of packed held-out sequences on which losses are measured."""

    def interval(self, num_steps: int, batch_size: int, size: int) -> int | None:
        """Return the number of steps between evaluations; None to evaluate only at the end."""
        if not size or self.every is None:
            return None
        if self.every != "auto":
            return self.every
        least = -(-_TRAINED_PER_MEASURED * size // batch_size)
        every = max(1, num_steps // _NUM_EVALUATIONS, least)
        return every if every < num_steps else None


class CheckpointSettings(Settings):
    """Checkpoints from which an interrupted run resumes."""

    every: int | None = Field(500, ge=1)
    """Number of steps between checkpoints; null: write no checkpoints."""
    keep: int = Field(2, ge=1)
    """Number of most recent checkpoints that are kept."""
    keep_best: bool = True
    """Keep the best drafter of all evaluations in the run's folder `best`: the one with the highest
    tau_probabilistic on held-out data or, without held-out data, with the highest tau. With
    held-out data, the run ends with this drafter, which may be an earlier one than the last."""


class TrainSettings(Settings):
    """The settings of one training run."""

    target: TargetSettings
    """The frozen target."""
    data: DataSettings
    """The training data."""
    drafter: DrafterSettings = DrafterSettings()
    """The drafter's architecture and the depth of its draft trees."""
    initialize: InitializeSettings = InitializeSettings()
    """The drafter's initial weights."""
    lora: LoraSettings | None = None
    """Train only low-rank adapters of the drafter named by initialize.drafter; null: train all
    weights."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """The training loss."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer and its learning rate over time."""
    target_states: TargetStateSettings = TargetStateSettings()
    """The source of the target's states for the training data."""
    batch: BatchSettings = BatchSettings()
    """The batch of one optimizer step; the same for any number of processes."""
    engine: EngineSettings = EngineSettings()
    """The settings of the DeepSpeed engine."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Measurements on held-out data: losses, and tau measured by the real decode loop."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Checkpoints from which an interrupted run resumes, and the best drafter so far."""
    steps: int | None = Field(None, ge=1)
    """Number of optimizer steps; null: as many as `epochs` takes, or 1000 if `epochs` is null, too.
    If both are set, the run ends after the smaller number of steps."""
    epochs: float | None = Field(None, gt=0)
    """Number of passes over the packed training sequences, which determines the number of optimizer
    steps; may be a fraction. null: the number of steps is set by `steps`."""
    minutes: float | None = Field(None, gt=0)
    """Number of minutes of optimizer steps after which the run ends, even if steps remain; the time
    of evaluations and of the preparation is not counted. The learning rate falls with this time, so
    that it is lowest at the end; the weights therefore depend on the speed of the machine. null:
    take all steps."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights, the order of the data, and the anchors."""
    log_every: int = Field(10, ge=1)
    """Number of steps between records of the metrics."""
    run_folder: Path = Path("runs/drafter")
    """Folder of the metrics and checkpoints; the finished drafter is written to its sub-folder
    `drafter`."""

    @model_validator(mode="before")
    @classmethod
    def _has_a_length(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if values.get("steps") is None and values.get("epochs") is None:
            return {**values, "steps": _DEFAULT_STEPS}
        return values

    @property
    def num_steps(self) -> int:
        """The number of optimizer steps; if `epochs` is set, call `with_steps` first."""
        assert self.steps is not None, "call with_steps first"
        return self.steps

    def with_steps(self, num_sequences: int) -> "TrainSettings":
        """Return the settings with `steps` computed from `epochs`, unless this is None."""
        if self.epochs is None:
            return self
        steps = max(1, math.ceil(self.epochs * num_sequences / self.batch.global_batch_size))
        steps = steps if self.steps is None else min(steps, self.steps)
        if self.optimizer.warmup_for(steps) > steps:
            raise ConfigError(
                "the warm-up is longer than the run",
                expected=f"optimizer.warmup_steps of at most {steps}, the number of steps for "
                f"epochs={self.epochs:g}",
                got=self.optimizer.warmup_steps,
                remedy="set optimizer.warmup_steps to auto, or raise epochs",
            )
        return self.model_copy(update={"steps": steps, "epochs": None})

    @property
    def keeps_best(self) -> bool:
        """Whether the best drafter is kept: `keep_best` is set, and something is measured."""
        has_sequences = self.data.validation_size > 0 and self.evaluation.num_sequences > 0
        is_measured = has_sequences or self.evaluation.num_prompts > 0
        return self.checkpoint.keep_best and is_measured

    @model_validator(mode="after")
    def _settings_fit(self) -> "TrainSettings":
        wanted = next((wanted for is_broken, wanted in self._rules() if is_broken), None)
        if wanted is not None:
            raise ValueError(wanted)
        return self

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """Yield whether each rule between settings is broken, and what it wants."""
        drafter, engine, objective = self.drafter, self.engine, self.objective
        warmup = 0 if self.steps is None else self.optimizer.warmup_for(self.steps)
        yield (
            self.steps is not None and warmup > self.steps,
            f"optimizer.warmup_steps ({warmup}) no larger than steps ({self.steps}), or auto",
        )
        for name in ("anchor_samples", "anchors", "far_anchors", "curriculum_fraction"):
            yield (
                drafter.trunk.kind != "moa"
                and getattr(self.batch, name) != BatchSettings.model_fields[name].default,
                f"the default of batch.{name} when drafter.trunk.kind is not moa",
            )
        yield (
            drafter.schedule.path == "tables",
            "another drafter.schedule.path than tables, which are imported and not trained",
        )
        yield (
            engine.offload_optimizer and engine.zero_stage < 1,
            "engine.zero_stage 1, 2 or 3 when engine.offload_optimizer is true",
        )
        yield (
            engine.offload_parameters and engine.zero_stage < 3,
            "engine.zero_stage 3 when engine.offload_parameters is true",
        )
        is_muon = self.optimizer.kind == "muon"  # which sees only whole matrices
        yield (
            is_muon and (engine.zero_stage > 0 or engine.dtype != "fp32"),
            "engine.zero_stage 0 and engine.dtype fp32 when optimizer.kind is muon",
        )
        yield (
            is_muon and self.optimizer.weight_decay > 0,
            "optimizer.weight_decay 0 when optimizer.kind is muon",
        )
        has_norm = drafter.experts.output_norm == "head"
        yield (
            has_norm and (objective.feature_weight > 0 or objective.contrast_weight > 0),
            "objective.feature_weight 0 and objective.contrast_weight 0 when "
            "drafter.experts.output_norm is head, because the features are not normalized",
        )
        yield (
            (has_norm or drafter.experts.head == "own") and engine.zero_stage == 3,
            "engine.zero_stage at most 2 when drafter.experts.head is own or "
            "drafter.experts.output_norm is head",
        )
        yield (
            objective.multiple_choice_weight > 0 and drafter.experts.combine == "sum",
            "objective.multiple_choice_weight 0 when drafter.experts.combine is sum",
        )
        if self.lora is not None:
            yield (
                self.initialize.drafter is None,
                "a drafter named by initialize.drafter when lora is set",
            )
            yield is_muon, "optimizer.kind adamw when lora is set"
            yield engine.zero_stage == 3, "engine.zero_stage at most 2 when lora is set"


def anchor_rule(settings: TrainSettings) -> AnchorRule:
    levels = settings.drafter.schedule.autoregressive_levels
    if settings.drafter.trunk.is_block:
        return AnchorRule("roots", levels, num_roots=settings.batch.block_roots)
    if settings.drafter.trunk.reads_features:
        return AnchorRule("ttt", levels, settings.drafter.trunk.ttt_steps)
    kind = settings.batch.anchors
    if settings.drafter.tail_layers and kind == "drafting":
        kind = "blocks"
    batch = settings.batch
    return AnchorRule(kind, levels, batch.anchor_samples, far_share=batch.far_anchors)


def decoding_rule(settings: DrafterSettings) -> AnchorRule:
    """Return the rule that gives each distance that occurs in decoding equally many positions.

    Every drafter is evaluated with these anchors, even if it was trained with others.
    """
    levels = settings.schedule.autoregressive_levels
    if settings.trunk.is_block:
        return AnchorRule("roots", levels)
    if settings.tail_layers and not settings.trunk.reads_features:
        return AnchorRule("blocks", levels, near_share=1.0)  # tail layers need shared anchors
    return AnchorRule("ttt", levels, num_samples=levels)
