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
    """The optimizer and its learning rate over time."""

    kind: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon: orthogonalised updates of hidden matrices, with AdamW for the other
    parameters. muon learns from fewer tokens (learning rate about 0.02) but needs engine.zero_stage
    0 and engine.dtype fp32."""
    learning_rate: float = Field(1e-3, gt=0)
    """Learning rate at its peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the moving averages."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices."""
    warmup_steps: int = Field(50, ge=0)
    """Steps in which the learning rate rises linearly to its peak."""
    schedule: Literal["linear", "cosine"] = "linear"
    """Shape of the decay from the peak to the last step."""
    min_lr_ratio: float = Field(0.05, ge=0, le=1)
    """Ratio of the peak that the learning rate has at the last step."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Largest norm of the gradient; 0: no limit."""


class EngineSettings(Settings):
    """The settings of the DeepSpeed engine.

    Only `dtype` changes the result of a run; the other settings change its memory and speed.
    """

    zero_stage: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also parameters; at least 1 in
    half precision."""
    dtype: Precision = "fp32"
    """Precision in which the drafter computes; master weights are fp32."""
    offload_optimizer: bool = False
    """Keep optimizer states in main memory and take the optimizer's steps there; needs zero_stage 1
    or more."""
    offload_parameters: bool = False
    """Keep parameters in main memory until they are used; needs zero_stage 3."""
    activation_checkpointing: bool = False
    """Recompute the drafter's activations in the backward pass instead of storing them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto prefers a GPU."""


class EvaluationSettings(Settings):
    """Evaluation on data outside of training: validation loss, and tau of the real decode loop.

    Evaluation does not change the drafter, so a run can go on with other settings of it; `best` is
    then the best drafter of all evaluations, whatever their settings.
    """

    every: int | None = Field(None, ge=1)
    """Steps between evaluations, from step 0 on; null: only the one at the end."""
    prompts: Path | None = None
    """A prompt file as `jakiro bench` reads it, or one of text records; of a dialogue the first
    turn is answered. null: the starts of held-out conversations."""
    num_prompts: int = Field(8, ge=0)
    """Prompts to decode; 0: none."""
    prompt_tokens: int = Field(64, ge=1)
    """Length of the prompt that is cut from a held-out text; a conversation is cut before its first
    response."""
    max_new_tokens: int = Field(64, ge=1)
    """Length of each continuation."""
    temperatures: tuple[NonNegativeFloat, ...] = (0.0,)
    """Temperatures to decode at; 0 is greedy."""
    num_sequences: int = Field(32, ge=0)
    """Packed held-out sequences to measure losses on."""


class CheckpointSettings(Settings):
    """Checkpoints, from which an interrupted run goes on."""

    every: int | None = Field(500, ge=1)
    """Steps between checkpoints; null: none."""
    keep: int = Field(2, ge=1)
    """Number of latest checkpoints that are kept."""
    keep_best: bool = True
    """Keep the drafter with the highest measured tau in the folder `best` of the run; needs
    evaluation.num_prompts."""


class TrainSettings(Settings):
    """The settings of one training run."""

    target: TargetSettings
    """The frozen target."""
    data: DataSettings
    """The training data."""
    drafter: DrafterSettings = DrafterSettings()
    """The drafter; these keys decide its parameters."""
    initialize: InitializeSettings = InitializeSettings()
    """Where the drafter's weights start."""
    lora: LoraSettings | None = None
    """Train low-rank adapters of the drafter that initialize.drafter names; null: train all
    weights."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """The training loss."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer and its learning rate over time."""
    target_states: TargetStateSettings = TargetStateSettings()
    """Where the target's states for the training data come from."""
    batch: BatchSettings = BatchSettings()
    """What one optimizer step sees; the same for any number of processes."""
    engine: EngineSettings = EngineSettings()
    """How DeepSpeed trains the drafter."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Measurements on held-out data: losses, and tau by the real decode loop."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """How often the state of the run is saved."""
    steps: int = Field(1000, ge=1)
    """Optimizer steps."""
    seed: int = Field(0, ge=0)
    """Seed of the initial weights, the order of the data, and the anchors."""
    log_every: int = Field(10, ge=1)
    """Steps between records of the metrics."""
    run_folder: Path = Path("runs/drafter")
    """Folder of metrics, checkpoints, and in the end the folder `drafter`."""

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
