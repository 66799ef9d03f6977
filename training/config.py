"""The settings of a training run."""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, model_validator

from jakiro.config import DrafterSettings
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
from training.loss.objectives import ObjectiveSettings


class OptimizerSettings(Settings):
    """The optimizer and its learning rate over time.

    Attributes:
        kind: "adamw", or "muon" for orthogonalised updates of hidden matrices with AdamW beside
            it, which learns from fewer tokens but needs whole matrices: ZeRO 0 and fp32.
        learning_rate: learning rate at its peak.
        betas: decay rates of AdamW's moving averages.
        weight_decay: decoupled weight decay, applied to matrices only.
        warmup_steps: optimizer steps in which the rate rises linearly to its peak.
        schedule: shape of the decay from the peak to `min_lr_ratio` at the last step.
        min_lr_ratio: ratio of the learning rate at the last step to its peak.
        max_grad_norm: largest norm of the gradient, which is clipped to it; 0 for no limit.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(50, ge=0)
    schedule: Literal["linear", "cosine"] = "linear"
    min_lr_ratio: float = Field(0.05, ge=0, le=1)
    max_grad_norm: float = Field(1.0, ge=0)


class EngineSettings(Settings):
    """The settings of the DeepSpeed engine.

    Only `dtype` changes the result of a run; the other settings change its memory and speed.

    Attributes:
        zero_stage: what ZeRO partitions over the processes: 0 nothing, 1 optimizer states, 2 also
            gradients, 3 also parameters; in half precision at least 1 is used.
        dtype: dtype that the drafter computes in; master weights are fp32.
        offload_optimizer: whether optimizer states and master weights are kept in main memory, and
            the optimizer computes there; needs `zero_stage` 1 or more.
        offload_parameters: whether parameters are kept in main memory until they are used; needs
            `zero_stage` 3.
        activation_checkpointing: whether the backward pass computes the drafter's activations again
            instead of keeping them.
        device: device that computes; "auto" prefers a GPU.
    """

    zero_stage: Literal[0, 1, 2, 3] = 0
    dtype: Precision = "fp32"
    offload_optimizer: bool = False
    offload_parameters: bool = False
    activation_checkpointing: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"


class EvaluationSettings(Settings):
    """Evaluation on data outside of training: validation loss, and tau of the real decode loop.

    Evaluation does not change the drafter, so a run can go on with other settings of it; `best` is
    then the best drafter of all evaluations, whatever their settings.

    Attributes:
        every: optimizer steps between evaluations, with one before the first step; None to evaluate
            only at the end.
        prompts: a file of prompts as `jakiro bench` reads it, or of records `{"text": ...}`; only
            the first turn of a dialogue is answered. None for starts of validation conversations.
        num_prompts: number of prompts that are decoded; 0 for none.
        prompt_tokens: number of tokens of a validation text without response mask that become its
            prompt.
        max_new_tokens: length of each answer in tokens.
        temperatures: temperatures of the answers; 0 is greedy.
        num_sequences: number of packed validation sequences to measure the loss on.
    """

    every: int | None = Field(None, ge=1)
    prompts: Path | None = None
    num_prompts: int = Field(8, ge=0)
    prompt_tokens: int = Field(64, ge=1)
    max_new_tokens: int = Field(64, ge=1)
    temperatures: tuple[NonNegativeFloat, ...] = (0.0,)
    num_sequences: int = Field(32, ge=0)


class CheckpointSettings(Settings):
    """Checkpoints, from which an interrupted run goes on.

    Attributes:
        every: optimizer steps between checkpoints; None for no checkpoints.
        keep: number of the latest checkpoints that stay on disk.
        keep_best: whether the drafter with the highest measured tau so far is kept as a drafter
            folder, `run_folder/best`; needs `evaluation.num_prompts`.
    """

    every: int | None = Field(500, ge=1)
    keep: int = Field(2, ge=1)
    keep_best: bool = True


class TrainSettings(Settings):
    """The settings of one training run.

    Attributes:
        target: the frozen target.
        data: the training data.
        drafter: the architecture of the drafter.
        initialize: the start of the drafter's weights.
        lora: adapters of the drafter that `initialize.drafter` names; None to train all weights.
        objective: weights of the loss terms.
        optimizer: the optimizer and its learning rate.
        target_states: whether the target runs beside the drafter, or its states come from disk.
        batch: size of an optimizer step, and the anchors in it.
        engine: settings of DeepSpeed.
        evaluation: measurements during the run and at its end.
        checkpoint: checkpoints, from which an interrupted run goes on.
        steps: number of optimizer steps.
        seed: seed of initial weights, order of sequences, and anchors.
        log_every: optimizer steps between records of the metrics.
        run_folder: folder of metrics, checkpoints, and in the end the drafter.
    """

    target: TargetSettings
    data: DataSettings
    drafter: DrafterSettings = DrafterSettings()
    initialize: InitializeSettings = InitializeSettings()
    lora: LoraSettings | None = None
    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    target_states: TargetStateSettings = TargetStateSettings()
    batch: BatchSettings = BatchSettings()
    engine: EngineSettings = EngineSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    steps: int = Field(1000, ge=1)
    seed: int = Field(0, ge=0)
    log_every: int = Field(10, ge=1)
    run_folder: Path = Path("runs/drafter")

    @model_validator(mode="after")
    def _warmup_ends(self) -> "TrainSettings":
        if self.optimizer.warmup_steps > self.steps:
            raise ValueError("optimizer.warmup_steps at most as large as steps")
        return self

    @model_validator(mode="after")
    def _anchors_fit_the_trunk(self) -> "TrainSettings":
        default = BatchSettings()
        names = ("anchor_samples", "anchors", "curriculum_fraction")
        given = [name for name in names if getattr(self.batch, name) != getattr(default, name)]
        if self.drafter.trunk.reads_features and given:
            raise ValueError(f"no batch.{given[0]} with drafter.trunk.kind feedback or hybrid")
        return self

    @model_validator(mode="after")
    def _offloading_has_partitions(self) -> "TrainSettings":
        engine = self.engine
        if engine.offload_optimizer and engine.zero_stage < 1:
            raise ValueError("engine.zero_stage 1, 2 or 3 with engine.offload_optimizer")
        if engine.offload_parameters and engine.zero_stage < 3:
            raise ValueError("engine.zero_stage 3 with engine.offload_parameters")
        return self

    @model_validator(mode="after")
    def _muon_sees_whole_matrices(self) -> "TrainSettings":
        is_whole = self.engine.zero_stage == 0 and self.engine.dtype == "fp32"
        if self.optimizer.kind == "muon" and not is_whole:
            raise ValueError("engine.zero_stage 0 and engine.dtype fp32 with optimizer.kind muon")
        if self.optimizer.kind == "muon" and self.optimizer.weight_decay:
            raise ValueError("optimizer.weight_decay 0 with optimizer.kind muon")
        return self

    @model_validator(mode="after")
    def _adapters_fit(self) -> "TrainSettings":
        if self.lora is None:
            return self
        if self.initialize.drafter is None:
            raise ValueError("initialize.drafter with lora: a drafter whose weights are adapted")
        if self.optimizer.kind == "muon":
            raise ValueError("optimizer.kind adamw with lora")
        if self.engine.zero_stage == 3:
            raise ValueError("engine.zero_stage at most 2 with lora")
        return self


def anchor_rule(settings: TrainSettings) -> AnchorRule:
    """Return the rule that selects the anchors of a run."""
    levels = settings.drafter.schedule.autoregressive_levels
    if settings.drafter.trunk.reads_features:
        return AnchorRule("rollout", levels, settings.drafter.trunk.ttt_steps)
    kind = settings.batch.anchors
    if settings.drafter.tail_layers and kind == "drafting":
        kind = "blocks"
    return AnchorRule(kind, levels, settings.batch.anchor_samples)


def decoding_rule(settings: DrafterSettings) -> AnchorRule:
    """Return the rule of anchors at the distances of decoding, each as often as the others.

    Every drafter is measured with these anchors, whatever anchors it was trained with.
    """
    levels = settings.schedule.autoregressive_levels
    if settings.tail_layers and not settings.trunk.reads_features:
        return AnchorRule("blocks", levels, near_share=1.0)  # with a tail, positions share anchors
    return AnchorRule("rollout", levels, num_samples=levels)
