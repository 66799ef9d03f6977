"""Everything that decides a training run, in one file of settings."""

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
        learning_rate: at the peak.
        betas: of the moving averages.
        weight_decay: decoupled, applied to matrices only.
        warmup_steps: steps in which the rate rises linearly to its peak.
        schedule: shape of the fall from the peak to the floor at the last step.
        floor: share of the peak that remains at the last step.
        clip: largest norm of the gradient; 0 for no limit.
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
    """How DeepSpeed shares the drafter out.

    Attributes:
        zero_stage: 0 shares nothing, 1 optimizer states, 2 also gradients, 3 also parameters;
            at least 1 in half precision.
        dtype: what the drafter computes in; master weights are fp32.
        offload_optimizer: keep optimizer states and master weights in main memory, and take the
            optimizer's steps there; needs ZeRO 1 or more.
        offload_parameters: keep parameters there until they are used; needs ZeRO 3.
        activation_checkpointing: compute the drafter's activations again in the backward pass
            instead of keeping them.
        device: "auto" prefers a GPU.

    Only `dtype` decides the result; the others decide memory and speed.
    """

    zero_stage: Literal[0, 1, 2, 3] = 0
    dtype: Precision = "fp32"
    offload_optimizer: bool = False
    offload_parameters: bool = False
    activation_checkpointing: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"


class EvaluationSettings(Settings):
    """Measuring on what training does not see: held-out loss, and the real decode loop.

    It changes no step, so a run can go on with other settings of it; `best` is then the best of
    what was measured either way.

    Attributes:
        every: steps between evaluations, the first before any step; None for one at the end.
        prompts: a file as `jakiro bench` reads it, or of `{"text"}` rows; of dialogues the first
            turn is answered. None for starts of held-out conversations.
        num_prompts: how many are decoded; 0 for none.
        prompt_tokens: how much of a held-out text without response mask becomes its prompt.
        max_new_tokens: length of each answer.
        temperatures: of the answers; 0 is greedy.
        held_out_rows: packed rows of held-out data to measure the loss on.
    """

    every: int | None = Field(None, ge=1)
    prompts: Path | None = None
    num_prompts: int = Field(8, ge=0)
    prompt_tokens: int = Field(64, ge=1)
    max_new_tokens: int = Field(64, ge=1)
    temperatures: tuple[NonNegativeFloat, ...] = (0.0,)
    num_sequences: int = Field(32, ge=0)


class CheckpointSettings(Settings):
    """What an interruption may cost.

    Attributes:
        every: steps between checkpoints; None for none.
        keep: how many of the latest stay on disk.
        keep_best: whether the drafter with the highest measured tau so far is kept as a drafter
            folder, `run_folder/best`; needs `evaluation.num_prompts`.
    """

    every: int | None = Field(500, ge=1)
    keep: int = Field(2, ge=1)
    keep_best: bool = True


class TrainSettings(Settings):
    """One training run.

    Attributes:
        lora: train adapters of the drafter that `initialize.drafter` names; None for all weights.
        steps: optimizer steps.
        seed: of initial weights, order of rows, and anchors.
        log_every: steps between records of the metrics.
        run_folder: receives metrics, checkpoints, and in the end the drafter.
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
        own = BatchSettings()
        named = ("draws", "anchors", "curriculum")
        is_given = [name for name in named if getattr(self.batch, name) != getattr(own, name)]
        if self.drafter.trunk.reads_features and is_given:
            raise ValueError(f"no batch.{is_given[0]} with drafter.trunk.kind feedback or hybrid")
        return self

    @model_validator(mode="after")
    def _offloaded_is_shared_out(self) -> "TrainSettings":
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
    """Return how the anchors of a run are chosen."""
    levels = settings.drafter.schedule.autoregressive_levels
    if settings.drafter.trunk.reads_features:
        return AnchorRule("rollout", levels, settings.drafter.trunk.ttt_steps)
    kind = settings.batch.anchors
    if settings.drafter.tail_layers and kind == "drafting":
        kind = "blocks"
    return AnchorRule(kind, levels, settings.batch.anchor_samples)


def decoding_rule(settings: DrafterSettings) -> AnchorRule:
    """Return anchors at the distances that decoding has, each as often as the others.

    However a drafter was trained, this is what it is measured with.
    """
    levels = settings.schedule.autoregressive_levels
    if settings.tail_layers and not settings.trunk.reads_features:
        return AnchorRule("blocks", levels, near_share=1.0)  # in one row positions share anchors
    return AnchorRule("rollout", levels, draws=levels)
