"""Settings that several commands share: how a target is loaded, and what it writes."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from inference.serving.settings import keys_in_environment
from jakiro.cli.output import say
from jakiro.utils.settings import Settings
from jakiro.utils.wording import long_dtype

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
        from jakiro.utils.devices import choose_device

        return choose_device(self.device)


class DecoderSettings(LoadSettings):
    """How the decoder computes."""

    target: str | None = None
    """The target; by default the one that the drafter's config names."""
    other_weights: bool = False
    """Use a trained drafter even if the target's weights differ from those that it was trained for,
    for example because they were not quantized."""
    batch_invariant: bool = False
    """For a target in half precision on a CPU: compute in such a way that drafts never change
    greedy text, which makes decoding steps slower."""
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

    def load(self, drafter: str) -> "SpeculativeDecoder":
        """Return the decoder, and say what the target is if its dtype was chosen automatically."""
        from inference import SpeculativeDecoder
        from jakiro.utils.pretrained import describe_model

        decoder = SpeculativeDecoder.from_pretrained(
            drafter,
            self.target,
            self.tree,
            compiled=self.compile,
            captured=self.capture,
            threads=self.threads,
            other_weights=self.other_weights,
            batch_invariant=self.batch_invariant,
            dtype=self.dtype,
            device_map=self.torch_device,
        )
        if self.dtype == "auto" or decoder.target.spec.gguf_sha256 is not None:
            say(f"target: {describe_model(decoder.target.model)}")
        return decoder


class PromptSettings(Settings):
    """What the text continues."""

    raw: bool = False
    """Continue the prompt as plain text. By default, the target's chat template is used, if there
    is one."""
    system: str | None = None
    """System prompt: instructions for a chat model."""
    stats: bool = False
    """Print statistics to standard error."""

    def messages(self, question: str) -> list[dict[str, Any]]:
        """Return the messages of a chat that begins with a question."""
        start = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*start, {"role": "user", "content": question}]


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
        return self.model_dump(include=set(SamplingSettings.model_fields), exclude_none=True)


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
