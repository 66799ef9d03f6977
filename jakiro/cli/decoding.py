"""Settings that the commands share which decode: how a target is loaded, and what it writes."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from inference.serving.settings import keys_in_environment
from jakiro.cli.output import say
from jakiro.utils.dtype_names import long_dtype
from jakiro.utils.settings import Settings

if TYPE_CHECKING:
    import torch

    from inference import SpeculativeDecoder


class LoadSettings(Settings):
    """Numbers of the target."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(long_dtype)
    ] = "auto"
    """Dtype of the target; auto: the dtype of its checkpoint or, for a GGUF file, bfloat16 if the
    hardware supports it, and float32 otherwise. The names fp32, bf16 and fp16 are accepted too."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""

    @property
    def torch_device(self) -> "torch.device":
        """The device; this raises a ConfigError if it does not exist."""
        from jakiro.utils.pretrained import choose_device

        return choose_device(self.device)


class ExactSettings(LoadSettings):
    """How the target computes."""

    other_weights: bool = False
    """Use a trained drafter even if the target's weights differ from those that it was trained for,
    for example because they were not quantized."""
    batch_invariant: bool = False
    """For a target in half precision on a CPU: compute in such a way that drafts never change
    greedy text, which makes decoding steps slower."""


class DecoderSettings(ExactSettings):
    """How the decoder computes."""

    tree: Literal["auto", "fixed"] = "auto"
    """auto: measured costs and acceptance rates determine the tree in each decoding step; fixed:
    trees of one shape, with the levels that the drafter was trained for."""
    threads: PositiveInt | Literal["auto"] = "auto"
    """Number of threads of decoding steps on a CPU; auto measures which is fastest."""
    compile: bool = False
    """Compile decoding steps and the drafter; the first steps are then slow."""
    capture: bool = False
    """On a GPU, record decoding steps as CUDA graphs, and start each step before the result of the
    previous one is read (experimental)."""

    def load(self, drafter: str, target: str | None) -> "SpeculativeDecoder":
        """Return the decoder, and say what the target is if its dtype was chosen automatically."""
        from inference import SpeculativeDecoder
        from jakiro.utils.gguf import gguf_checksum
        from jakiro.utils.pretrained import describe_model

        decoder = SpeculativeDecoder.from_pretrained(
            drafter,
            target,
            self.tree,
            compiled=self.compile,
            captured=self.capture,
            threads=self.threads,
            other_weights=self.other_weights,
            batch_invariant=self.batch_invariant,
            dtype=self.dtype,
            device_map=self.torch_device,
        )
        model: Any = decoder.target.model
        if self.dtype == "auto" or gguf_checksum(model.config) is not None:
            say(f"target: {describe_model(model)}")
        return decoder


class SamplingSettings(Settings):
    """Text to generate."""

    max_new_tokens: int = Field(128, ge=1)
    """Largest number of new tokens of a text."""
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    """0 for greedy decoding, above 0 for sampling; by default the value of the target's generation
    config."""
    top_p: float | None = Field(None, ge=0, le=1)
    """As in generate(); by default the value of the target's generation config."""
    top_k: int | None = Field(None, ge=0)
    """As in generate(); by default the value of the target's generation config."""
    seed: int | None = None
    """The same seed gives the same sampled text; with a seed, all trees have one size."""

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of `generate` that have a value."""
        own = {name: getattr(self, name) for name in SamplingSettings.model_fields}
        return {name: value for name, value in own.items() if value is not None}


class DialogueSettings(SamplingSettings):
    """Answers."""

    system: str | None = None
    """System prompt: instructions for a chat model."""
    max_new_tokens: int = Field(512, ge=1)
    """Largest number of tokens of an answer."""
    seed: int | None = None
    """The same seed and messages give the same answers; by default, sampled answers differ each
    time."""


def server_key() -> str | None:
    """Return the first key in the environment; None if there is none."""
    return next((key.get_secret_value() for key in keys_in_environment()), None)
