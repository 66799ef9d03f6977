"""A drafter's settings and the record of its target, as a Hugging Face config.

The arguments of a drafter's modules follow from its config.
"""

from typing import Any

from transformers import PreTrainedConfig

from jakiro.drafter_settings import DrafterSettings, largest_draft_vocab_size
from jakiro.errors import ConfigError
from jakiro.target.cache import StateSource, StateSources
from jakiro.target.record import TargetRecord
from jakiro.utils.rope import rope_frequencies
from jakiro.utils.settings import validate_settings
from moa.layers import Rotary


class JakiroConfig(PreTrainedConfig):
    """The `config.json` of a drafter.

    Args:
        drafter: fields of `DrafterSettings`; None only in a config without a drafter.
        target: fields of `TargetRecord`; None only in a config without a drafter.
        record: free-form metadata stored with the weights (provenance, training, evaluation); None
            if there is no metadata.
    """

    model_type = "jakiro"

    def __init__(
        self,
        drafter: dict[str, Any] | None = None,
        target: dict[str, Any] | None = None,
        record: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.drafter, self.target, self.record = drafter, target, record
        super().__init__(**kwargs)

    @property
    def settings(self) -> DrafterSettings:
        """The validated drafter settings."""
        values = {"draft_vocab_size": None} | (self.drafter or {})
        return validate_settings(DrafterSettings, values, source="the drafter config")

    @property
    def draft_vocab_size(self) -> int | None:
        """The number of tokens that may be drafted; None if all tokens may be drafted."""
        size = self.settings.draft_vocab_size
        return size if isinstance(size, int) else None  # `config_for` writes no `auto`

    @property
    def target_record(self) -> TargetRecord:
        """The validated record of the target."""
        source = "the drafter config's target"
        return validate_settings(TargetRecord, self.target or {}, source=source)


def config_for(settings: DrafterSettings, target: TargetRecord) -> JakiroConfig:
    """Return the config of a drafter; trunk settings that are None get the target's values.

    The config contains the size of the draft vocabulary as a number or None. If the settings say
    `auto`, the config gets the largest size that they allow (see `largest_draft_vocab_size`).
    Training therefore replaces `auto` with the size for its data before it calls this function.
    """
    _check_sources(settings, target)
    _check_sizes(settings, target)
    heads = settings.trunk.heads_for(target.attention)
    trunk = settings.trunk.model_copy(update=heads.model_dump())
    size = largest_draft_vocab_size(settings, target.vocab_size)
    completed = settings.model_copy(update={"trunk": trunk, "draft_vocab_size": size})
    return JakiroConfig(
        drafter=completed.model_dump(mode="json"), target=target.model_dump(mode="json")
    )


def state_sources(settings: DrafterSettings, target: TargetRecord) -> StateSources:
    """Return the target states that memory and features are made from."""
    trunk = settings.trunk
    memory = _memory_source(settings, target) if trunk.attends_memory else None
    if not trunk.reads_features:
        return StateSources(memory, None)
    last = last_hidden_state(target)
    if settings.schedule.heads == "transfer":
        last -= settings.tail_layers
    layers = (last,) if trunk.fusion_layers is None else trunk.fusion_layers
    return StateSources(memory, StateSource("hidden", layers))


def _memory_source(settings: DrafterSettings, target: TargetRecord) -> StateSource:
    memory, is_kv = settings.memory, settings.memory.source == "kv"
    count = len(target.kv_widths) if is_kv else last_hidden_state(target) + 1
    early = (max(1, (count - 1) // 4), max(1, (count - 1) // 2))
    default: tuple[int, ...] = (*(early if memory.layer_attention else ()), count - 1)
    if settings.trunk.is_block:  # the inputs of the layers as which a block starts
        own = range(count - 1 - settings.trunk.num_layers, count - 1)
        default = tuple(dict.fromkeys((*early, *own)))
    if is_kv:
        default = tuple(range(count))
    layers = default if memory.layers is None else memory.layers
    counted = (layer + count if layer < 0 else layer for layer in layers)
    return StateSource(memory.source, tuple(counted))


def last_hidden_state(target: TargetRecord) -> int:
    """Return the index of a target's last hidden state, which is its feature."""
    if target.num_hidden_states is None:
        raise ConfigError(
            "the hidden states of the target cannot be read",
            expected="a target whose hidden states are one vector of the hidden size per token",
            got=f"{target.name_or_path}, whose hidden states have a different shape",
            remedy="set drafter.trunk.kind=moa, drafter.memory.source=kv and drafter.tail_layers=0",
        )
    return target.num_hidden_states - 1


def state_widths(source: StateSource, target: TargetRecord) -> list[int]:
    """Return the width of each layer's state."""
    if source.kind == "hidden":
        return [target.hidden_size] * len(source.layers)
    return [target.kv_widths[layer] for layer in source.layers]


def trunk_arguments(config: JakiroConfig) -> dict[str, Any]:
    """Return the arguments of the `moa.trunk.Trunk` of a drafter."""
    settings = config.settings
    trunk = settings.trunk
    assert trunk.rope_theta is not None, "`config_for` completes the settings"
    assert trunk.head_dim is not None, "`config_for` completes the settings"
    frequencies, scale = rope_frequencies(trunk.rope, trunk.rope_theta, trunk.head_dim)
    return {
        "hidden": config.target_record.hidden_size,
        "attends_memory": trunk.attends_memory,
        "reads_features": trunk.reads_features,
        "norm_eps": settings.norm_eps,
        "rope_frequencies": frequencies,
        "rope_scale": scale,
        "layer_width": settings.experts.intermediate_size,
        "is_block": trunk.is_block,
        **trunk.form,
        **trunk.geometry,
    }


def encoder_arguments(config: JakiroConfig) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the arguments of the `moa.memory.MemoryEncoder` of memory, and of the one of features.

    They are None for an output that the trunk ignores.
    """
    settings, target = config.settings, config.target_record
    read = settings.memory
    sizes = read.model_dump(exclude={"source", "layers", "rope", "rotated", "mixture"})
    frequencies, scale = rope_frequencies(read.rope, read.rope_theta, read.head_dim)
    sizes |= {"rope_frequencies": frequencies, "rope_scale": scale, "norm_eps": settings.norm_eps}
    fused = sizes | {"layer_attention": False, "common_width": None}
    fused["always_project"] = settings.trunk.fusion_layers is not None
    fused |= {"output_bias": settings.trunk.input_bias, "state_norm": settings.trunk.fusion_norm}

    def of(source: StateSource | None, sizes: dict[str, Any]) -> dict[str, Any] | None:
        if source is None:
            return None
        width = max(state_widths(source, target))
        shape = {"num_layers": len(source.layers), "width": width, "hidden": target.hidden_size}
        return shape | sizes

    memory, features = state_sources(settings, target)
    return of(memory, sizes), of(features, fused)


def undone_rotation(config: JakiroConfig) -> Rotary | None:
    """Return the `Rotary` that undoes the rotation of the target's keys at negated positions.

    The result is None if memory is made from keys as the target caches them, or not from keys.
    """
    settings, rotation = config.settings, config.target_record.key_rotation
    is_read = settings.trunk.attends_memory and settings.memory.source == "kv"
    if not is_read or settings.memory.rotated:
        return None
    assert rotation is not None, "`config_for` checks it"
    return Rotary(2 * len(rotation.frequencies), 1.0, rotation.frequencies, 1 / rotation.scale)


def masks_arguments(config: JakiroConfig) -> dict[str, Any]:
    """Return the arguments of the `jakiro.levels.LevelMasks` of a drafter."""
    settings, block = config.settings, config.settings.trunk.block
    own = "query" if settings.trunk.is_block else "trained"
    is_free = settings.trunk.is_block and not block.causal
    return {
        "hidden": config.target_record.hidden_size,
        "num_levels": settings.schedule.parallel_levels,
        "features": own if settings.trunk.reads_features else "none",
        "is_causal": not is_free,
        "predicts_from": block.predicts_from,
        "embedding": "trained" if block.mask_token is None else "token",
    }


def experts_arguments(config: JakiroConfig) -> dict[str, Any]:
    """Return the arguments of the `jakiro.experts.MixtureOfExperts` of a drafter."""
    settings = config.settings
    schedule = settings.schedule
    return {
        "hidden": config.target_record.hidden_size,
        "num_parallel": schedule.parallel_levels if schedule.heads == "experts" else 0,
        "norm_eps": settings.norm_eps,
        **settings.experts.form,
    }


def _check_sources(settings: DrafterSettings, target: TargetRecord) -> None:
    """Raise an error unless the target has the states that are read, in the same width."""
    memory, features = state_sources(settings, target)
    for name, source in (("memory.layers", memory), ("trunk.fusion_layers", features)):
        if source is None:
            continue
        count = len(target.kv_widths) if source.kind == "kv" else target.num_hidden_states or 0
        if not source.layers or any(not 0 <= layer < count for layer in source.layers):
            raise ConfigError(
                f"drafter.{name} is empty or names layers that the target does not have",
                expected=f"one or more indices from 0 to {count - 1}",
                got=list(source.layers),
            )
    widths = set() if memory is None else set(state_widths(memory, target))
    if len(widths) > 1 and settings.memory.common_width is None:
        raise ConfigError(
            "the target's layers differ in the width of their keys and values",
            got=sorted(widths),
            remedy="set drafter.memory.common_width, or choose drafter.memory.layers that all have "
            "the same width",
        )
    if memory is not None and not settings.memory.rotated and target.key_rotation is None:
        raise ConfigError(
            "the rotation of the target's keys cannot be undone",
            expected="a target that rotates whole keys of all layers in the same way",
            got=target.name_or_path,
            remedy="set drafter.memory.rotated=true",
        )


def _check_sizes(settings: DrafterSettings, target: TargetRecord) -> None:
    tail, size = settings.tail_layers, settings.draft_vocab_size
    if tail and tail >= last_hidden_state(target):
        raise ConfigError(
            "drafter.tail_layers is too large, because a target layer must precede the tail layers",
            expected=f"fewer than the target's {last_hidden_state(target)} layers",
            got=tail,
        )
    if isinstance(size, int) and size > target.vocab_size:
        raise ConfigError(
            "drafter.draft_vocab_size is larger than the target's vocabulary",
            expected=f"at most {target.vocab_size}",
            got=size,
            remedy="lower this setting, or leave it out so that all tokens may be drafted",
        )
    if (mask := settings.trunk.block.mask_token) is not None and mask >= target.vocab_size:
        raise ConfigError(
            "drafter.trunk.block.mask_token is not a token of the target",
            expected=f"an id from 0 to {target.vocab_size - 1}",
            got=mask,
        )
