"""Rotary embeddings that are changed for long contexts, as transformers' models have them."""

from typing import Any, Literal

from pydantic import Field, model_validator

from jakiro.utils.settings import Settings

RopeKind = Literal["default", "linear", "llama3", "yarn"]


class RopeSettings(Settings):
    """Change of the rotary embedding for contexts that are longer than those of pre-training."""

    kind: RopeKind = "default"
    """Kind of the change. default: none; linear: all angles are divided by the factor; llama3 and
    yarn: only slow rotations are slowed down."""
    factor: float = Field(1.0, ge=1)
    """Factor by which the context is longer than in pre-training."""
    original_max_position_embeddings: int | None = Field(None, ge=1)
    """Number of positions in pre-training; required for llama3 and yarn."""
    low_freq_factor: float = Field(1.0, gt=0)
    """For llama3: parameter of the slowest rotations that are slowed down by the whole factor."""
    high_freq_factor: float = Field(4.0, gt=0)
    """For llama3: parameter of the fastest rotations that are slowed down at all."""
    beta_fast: float = Field(32.0, gt=0)
    """For yarn: number of rotations within the original context above which nothing is changed."""
    beta_slow: float = Field(1.0, gt=0)
    """For yarn: number of rotations below which the whole factor applies."""
    attention_factor: float | None = Field(None, gt=0)
    """For yarn: factor of rotated queries and keys; null for the factor of the yarn paper."""

    @model_validator(mode="after")
    def _has_a_context(self) -> "RopeSettings":
        if self.kind in ("llama3", "yarn") and self.original_max_position_embeddings is None:
            raise ValueError(f"original_max_position_embeddings is required for {self.kind}")
        if self.low_freq_factor == self.high_freq_factor:
            raise ValueError("low_freq_factor and high_freq_factor must differ")
        return self

    def parameters(self, rope_theta: float) -> dict[str, Any]:
        """Return the `rope_parameters` of transformers' configs."""
        context = ("factor", "original_max_position_embeddings")
        names: dict[RopeKind, tuple[str, ...]] = {
            "default": (),
            "linear": ("factor",),
            "llama3": (*context, "low_freq_factor", "high_freq_factor"),
            "yarn": (*context, "beta_fast", "beta_slow", "attention_factor"),
        }
        values = {name: getattr(self, name) for name in names[self.kind]}
        given = {name: value for name, value in sorted(values.items()) if value is not None}
        return {"rope_type": self.kind, "rope_theta": rope_theta} | given


def rope_frequencies(
    rope: RopeSettings, rope_theta: float, head_dim: int
) -> tuple[tuple[float, ...] | None, float]:
    """Return the angles per position of each pair of channels, and the factor of rotated vectors.

    The angles are None if they follow from the base alone.
    """
    if rope.kind == "default":
        return None, 1.0
    import torch  # not needed to read and check settings
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    positions = rope.original_max_position_embeddings or 1
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=int(positions * rope.factor),
        rope_parameters=rope.parameters(rope_theta),
    )
    with torch.device("cpu"):  # a drafter may be built on the meta device
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(factor)
