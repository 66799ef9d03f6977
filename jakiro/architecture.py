"""Arguments of a drafter's modules, and networks of its levels, which follow from its config."""

from typing import Any

from jakiro.config import JakiroConfig, state_sources, state_widths
from jakiro.experts import MixtureOfExperts
from jakiro.levels import HiddenTransfer, LevelHeads, LevelMasks
from jakiro.target.cache import StateSource
from jakiro.utils.rope import rope_frequencies
from moa.rotary import Rotary
from moa.trunk import NUM_EARLIER


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
        **trunk.form,
        **trunk.geometry,
    }


def encoder_arguments(config: JakiroConfig) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the arguments of the `moa.memory.MemoryEncoder` of memory, and of the one of features.

    They are None for an output that the trunk ignores.
    """
    settings, target = config.settings, config.target_record
    read = settings.memory
    sizes = read.model_dump(exclude={"source", "layers", "rope", "rotated"})
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


def memory_shapes(config: JakiroConfig) -> list[tuple[int, int]]:
    """Return the number of heads and the head size of each tensor of a drafter's encoded memory."""
    trunk = config.settings.trunk
    assert trunk.num_kv_heads is not None, "`config_for` completes the settings"
    assert trunk.head_dim is not None, "`config_for` completes the settings"
    kv = [(trunk.num_kv_heads, trunk.head_dim)] * 2 if trunk.attends_memory else []
    features = [(1, config.target_record.hidden_size)] if trunk.reads_features else []
    return kv + features


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


def experts_of(config: JakiroConfig) -> MixtureOfExperts | HiddenTransfer:
    """Return the new experts of a drafter, or the matrices in place of experts."""
    settings = config.settings
    if settings.schedule.heads == "transfer":
        return HiddenTransfer(
            config.target_record.hidden_size, 1 + settings.schedule.parallel_levels
        )
    return MixtureOfExperts(**experts_arguments(config))


def level_heads(config: JakiroConfig) -> LevelHeads | None:
    """Return new networks that predict parallel levels from the end of a path, if there are any."""
    settings = config.settings
    if settings.schedule.heads != "branch":
        return None
    return LevelHeads(
        hidden=config.target_record.hidden_size,
        width=settings.experts.intermediate_size,
        num_levels=settings.schedule.parallel_levels,
        norm_eps=settings.norm_eps,
    )


def level_masks(config: JakiroConfig) -> LevelMasks | None:
    """Return new masks of the parallel levels, if a drafter predicts these levels from masks."""
    settings = config.settings
    if settings.schedule.heads != "masks":
        return None
    return LevelMasks(
        hidden=config.target_record.hidden_size,
        num_levels=settings.schedule.parallel_levels,
        reads_features=settings.trunk.reads_features,
    )


def num_earlier_tokens(config: JakiroConfig) -> int:
    """Return the number of tokens before each query whose embeddings a drafter reads."""
    settings = config.settings
    if settings.trunk.tokens == "trigram":
        return NUM_EARLIER
    return int(settings.schedule.heads == "branch")
