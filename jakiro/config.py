"""Settings of a drafter and the record of its target, as a Hugging Face config."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator
from transformers import PreTrainedConfig

from jakiro.errors import ConfigError
from jakiro.target.attention_shape import AttentionShape
from jakiro.target.cache import StateSource, StateSources
from jakiro.target.record import TargetRecord
from jakiro.utils.settings import Settings, validate_settings


def _changed(settings: Settings) -> set[str]:
    """Return the names of the settings that are not at their defaults."""
    fields = type(settings).model_fields
    return {name for name, field in fields.items() if getattr(settings, name) != field.default}


class TrunkSettings(Settings):
    """Inputs of the trunk and geometry of its attention."""

    kind: Literal["moa", "feedback", "hybrid"] = "hybrid"
    """What the trunk reads. moa: tokens, and the target's memory by cross-attention; nothing is fed
    back. feedback: tokens and features; where the target's features are not known yet, its own.
    hybrid: both."""
    num_heads: int | None = Field(None, ge=1)
    """Query heads of each attention; null: as in the target's last layer."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key/value heads of each attention; null: as in the target's last layer."""
    head_dim: int | None = Field(None, ge=2, multiple_of=2)
    """Size of each head; null: as in the target's last layer."""
    rope_theta: float | None = Field(None, gt=0)
    """Wavelength base of the rotary positions; null: as in the target's last layer."""
    fusion_layers: tuple[int, ...] | None = None
    """For feedback and hybrid: indices of the hidden states that are fused into features, as in
    EAGLE-3 (0: the embedding, k: after layer k); null: the last hidden state alone, as in EAGLE-2.
    """
    ttt_steps: int = Field(1, ge=1, le=8)
    """For feedback and hybrid: drafting steps that training performs (training-time test); the
    first reads the target's features, the others the drafter's own."""
    input_norms: bool = True
    """For feedback and hybrid: normalise tokens and features before they are read."""

    @property
    def attends_memory(self) -> bool:
        """Whether the trunk has cross-attention to memory."""
        return self.kind != "feedback"

    @property
    def reads_features(self) -> bool:
        """Whether the trunk reads features together with tokens, so that they are fed back."""
        return self.kind != "moa"

    @property
    def geometry(self) -> dict[str, Any]:
        """The geometry that all attention modules of the trunk share, as keyword arguments."""
        return self.model_dump(include=set(AttentionShape.model_fields))

    def heads_for(self, attention: AttentionShape) -> AttentionShape:
        """Return the trunk's geometry for a target whose last layer has the geometry `attention`.

        Settings that are None take the target's values.

        Raises:
            ConfigError: `num_heads` is not a multiple of `num_kv_heads`.
        """
        given = {name: value for name, value in self.geometry.items() if value is not None}
        heads = attention.model_copy(update=given)
        if heads.num_heads % heads.num_kv_heads:
            raise ConfigError(
                "drafter.trunk.num_heads and num_kv_heads do not fit together",
                expected=f"a multiple of {heads.num_kv_heads} heads",
                got=heads.num_heads,
                remedy="set both, or leave out both to take the target's numbers",
            )
        return heads

    @model_validator(mode="after")
    def _heads_divide(self) -> "TrunkSettings":
        if self.num_heads and self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError("num_heads must be a multiple of num_kv_heads")
        return self

    @model_validator(mode="after")
    def _feedback_is_fed_back(self) -> "TrunkSettings":
        given = {"fusion_layers", "ttt_steps", "input_norms"} & _changed(self)
        if given and not self.reads_features:
            names = ", ".join(sorted(given))
            raise ValueError(f"{names} can be set only with trunk.kind feedback or hybrid")
        return self


class MemorySettings(Settings):
    """Memory made from the target's per-layer state, see `moa.memory`."""

    source: Literal["kv", "hidden"] = "kv"
    """kv: keys and values of the target's layers. hidden: hidden states (0: the embedding, the last
    one: the feature)."""
    layers: tuple[int, ...] | None = None
    """Indices of the layers or hidden states that are read; null: all keys and values, or an early,
    a middle and the last hidden state (without layer_attention the last one alone)."""
    layer_attention: bool = True
    """Layers attend to each other (layer self-attention); false: they are concatenated, and the
    last feature alone is used as memory unchanged."""
    common_width: int | None = Field(None, ge=1)
    """Project the state of each layer to this width first; null: no projection."""
    num_heads: int = Field(2, ge=1)
    """Heads of the layer self-attention."""
    head_dim: int = Field(32, ge=2, multiple_of=2)
    """Size of each head of the layer self-attention."""
    mlp_width: int = Field(128, ge=1)
    """Width of the feed-forward part of the layer self-attention."""


class ExpertsSettings(Settings):
    """The mixture of experts, see `jakiro.experts.MixtureOfExperts`."""

    num_experts: Literal[1, 2, 4] = 2
    """Number of experts; 1 switches experts off."""
    intermediate_size: int = Field(512, ge=1)
    """Width of the feed-forward network of each expert."""
    combine: Literal["sum", "mixture"] = "mixture"
    """mixture: a mixture of softmaxes, one distribution from several experts. sum: one feature and
    one softmax from all experts."""
    contrastive_head: bool = True
    """The parallel levels see the difference between the experts."""


class ScheduleSettings(Settings):
    """Depth of the draft tree."""

    autoregressive_levels: int = Field(2, ge=1, le=16)
    """Levels that take a pass of the trunk each; in training, anchors lie up to this far back."""
    parallel_levels: int = Field(1, ge=0, le=3)
    """Further levels, read off the last pass."""

    @property
    def depth(self) -> int:
        """The length of the longest path of a draft tree, in tokens."""
        return self.autoregressive_levels + self.parallel_levels


class DrafterSettings(Settings):
    """Everything that determines a drafter's parameters and its schedule."""

    trunk: TrunkSettings = TrunkSettings()
    """The attention part of the drafter."""
    memory: MemorySettings = MemorySettings()
    """The memory that the trunk attends to; unused by a feedback trunk."""
    experts: ExpertsSettings = ExpertsSettings()
    """The mixture of experts after the trunk."""
    schedule: ScheduleSettings = ScheduleSettings()
    """The depth of the draft."""
    tail_layers: Literal[0, 1, 2] = 0
    """Target layer inference (arXiv 2410.03804): this many of the target's own last layers follow
    the experts, which then predict the input of the first of them. Needs experts.combine sum and no
    parallel levels."""
    draft_vocab_size: int | None = Field(None, ge=1)
    """Draft only this many tokens, the most frequent ones in training; null: all."""

    @model_validator(mode="after")
    def _tail_follows_one_feature(self) -> "DrafterSettings":
        fits = self.experts.combine == "sum" and not self.schedule.parallel_levels
        if self.tail_layers and not fits:
            raise ValueError("tail_layers needs experts.combine sum and schedule.parallel_levels 0")
        return self


class JakiroConfig(PreTrainedConfig):
    """The `config.json` of a drafter.

    Args:
        drafter: fields of `DrafterSettings`; None for the defaults.
        target: fields of `TargetRecord`; None only in a config that is not used yet.
        record: free-form facts kept with the weights (provenance, training, evaluation), if any.
        **kwargs: fields of `PreTrainedConfig`.
    """

    model_type = "jakiro"

    def __init__(
        self,
        drafter: dict[str, Any] | None = None,
        target: dict[str, Any] | None = None,
        record: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.drafter = drafter
        self.target = target
        self.record = record
        super().__init__(**kwargs)

    @property
    def settings(self) -> DrafterSettings:
        """The validated drafter settings."""
        return validate_settings(DrafterSettings, self.drafter or {}, source="the drafter config")

    @property
    def target_record(self) -> TargetRecord:
        """The validated record of the target.

        Raises:
            ConfigError: the config names no target, or its record lacks a required field.
        """
        if self.target is None:
            raise ConfigError(
                "the drafter config names no target",
                expected="a `target` record",
                got="none",
                remedy="build the config with jakiro.config.config_for",
            )
        _check_complete(self.target)
        return validate_settings(TargetRecord, self.target, source="the drafter config's target")


def _check_complete(record: Mapping[str, Any]) -> None:
    fields = TargetRecord.model_fields.items()
    missing = [name for name, field in fields if field.is_required() and name not in record]
    if missing:
        raise ConfigError(
            "the drafter config's record of its target is incomplete",
            expected=f"a record with {', '.join(missing)}",
            got="a record without them",
            remedy="train the drafter again with this version of jakiro",
        )


def config_for(settings: DrafterSettings, target: TargetRecord) -> JakiroConfig:
    """Return the config of a drafter; trunk settings that are None take the target's values.

    Args:
        settings: settings of the drafter.
        target: record of the target that the drafter is for.

    Raises:
        ConfigError: the numbers of heads do not fit together, a memory layer lies outside the
            target, the widths of memory layers differ, or the target has too few layers or tokens.
    """
    _check_sources(settings, target)
    _check_sizes(settings, target)
    heads = settings.trunk.heads_for(target.attention)
    trunk = settings.trunk.model_copy(update=heads.model_dump())
    completed = settings.model_copy(update={"trunk": trunk})
    return JakiroConfig(
        drafter=completed.model_dump(mode="json"), target=target.model_dump(mode="json")
    )


def state_sources(settings: DrafterSettings, target: TargetRecord) -> StateSources:
    """Return the target states that memory and features are made from.

    Args:
        settings: settings of the drafter.
        target: record of the drafter's target.

    Raises:
        ConfigError: the settings need hidden states, and those of the target cannot be read.
    """
    trunk = settings.trunk
    memory = _memory_source(settings.memory, target) if trunk.attends_memory else None
    if not trunk.reads_features:
        return StateSources(memory, None)
    last = last_hidden_state(target)
    layers = (last,) if trunk.fusion_layers is None else trunk.fusion_layers
    return StateSources(memory, StateSource("hidden", layers))


def _memory_source(memory: MemorySettings, target: TargetRecord) -> StateSource:
    if memory.source == "kv":
        every = tuple(range(len(target.kv_widths)))
        return StateSource("kv", every if memory.layers is None else memory.layers)
    last = last_hidden_state(target)
    default = (max(1, last // 4), max(1, last // 2), last) if memory.layer_attention else (last,)
    return StateSource("hidden", default if memory.layers is None else memory.layers)


def last_hidden_state(target: TargetRecord) -> int:
    """Return the index of the last hidden state of a target, its feature.

    Raises:
        ConfigError: the target's hidden states cannot be read.
    """
    if target.num_hidden_states is None:
        raise ConfigError(
            "the hidden states of the target cannot be read",
            expected="a target whose layers pass on one vector per token",
            got=f"{target.name_or_path}, which has other layers",
            remedy="use drafter.trunk.kind moa, drafter.memory.source kv and drafter.tail_layers 0",
        )
    return target.num_hidden_states - 1


def state_widths(source: StateSource, target: TargetRecord) -> list[int]:
    """Return the width of each layer's state.

    Args:
        source: layers that are read, and whether keys and values or hidden states.
        target: record of the target.
    """
    if source.kind == "hidden":
        return [target.hidden_size] * len(source.layers)
    return [target.kv_widths[layer] for layer in source.layers]


def _check_sources(settings: DrafterSettings, target: TargetRecord) -> None:
    sources = state_sources(settings, target)
    named = {"memory.layers": sources.memory, "trunk.fusion_layers": sources.features}
    for name, source in named.items():
        if source is not None:
            _check_source(name, source, target)
    if sources.memory is not None and settings.memory.common_width is None:
        _check_widths(sources.memory, target)


def _check_source(name: str, source: StateSource, target: TargetRecord) -> None:
    count = len(target.kv_widths) if source.kind == "kv" else target.num_hidden_states or 0
    if not source.layers or any(not 0 <= layer < count for layer in source.layers):
        raise ConfigError(
            f"drafter.{name} names layers that the target does not have",
            expected=f"one or more indices from 0 to {count - 1}",
            got=list(source.layers),
        )


def _check_widths(source: StateSource, target: TargetRecord) -> None:
    if len(widths := set(state_widths(source, target))) > 1:
        raise ConfigError(
            "the target's layers differ in the width of their keys and values",
            expected="memory layers of equal width, or a common width to project them to",
            got=sorted(widths),
            remedy="set drafter.memory.common_width, or drafter.memory.layers of equal width",
        )


def _check_sizes(settings: DrafterSettings, target: TargetRecord) -> None:
    tail, size = settings.tail_layers, settings.draft_vocab_size
    if tail and tail >= last_hidden_state(target):
        raise ConfigError(
            "drafter.tail_layers leaves no layer of the target before the tail",
            expected=f"fewer than its {last_hidden_state(target)} layers",
            got=tail,
        )
    if size is not None and size > target.vocab_size:
        raise ConfigError(
            "drafter.draft_vocab_size is larger than the target's vocabulary",
            expected=f"at most {target.vocab_size}",
            got=size,
            remedy="lower it, or leave it out to draft all tokens",
        )
