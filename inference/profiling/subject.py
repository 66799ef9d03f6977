"""The subject of profiling: a target, a drafter of suitable size, and prompts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from inference.drafters.trained.drafter import TrainedDrafter, default_tree
from inference.engine.captured_run import CapturedRun
from inference.engine.loop import DecodeRun
from inference.engine.pipeline import PipelinePool
from inference.generation.preparation import prepare_requests
from inference.generation.prompt_file import BUILT_IN, read_prompts
from inference.generation.prompts import Prompt, encode_prompt
from inference.protocol import Drafter
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings, ExpertsSettings, MemorySettings, TrunkSettings
from jakiro.levels.schedule import ScheduleSettings
from jakiro.target.adapter import TargetAdapter, TargetSpec
from jakiro.target.record import check_target, record_target
from jakiro.utils.pretrained import TORCH_DTYPES, load_causal_lm, load_tokenizer
from jakiro.utils.settings import Settings

PROMPT_TOKENS = 64  # number of tokens of a random prompt


class SubjectSettings(Settings):
    """Target and drafter to measure.

    Attributes:
        target: folder or hub id of the target; None for a small model with random weights.
        drafter: folder of the drafter; None for a random drafter.
        dtype: dtype of the target and the drafter.
        device: device of the target and the drafter.
    """

    target: str | None = None
    drafter: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"


@dataclass(frozen=True)
class Effort:
    """Numbers of prompts, tokens and repetitions that determine the duration of a measurement."""

    prompts: int  # number of prompts
    new_tokens: int  # number of new tokens per prompt
    repeats: int  # number of repetitions of a decoding step or run


@dataclass(frozen=True)
class ProfilingSubject:
    """A target, a drafter and prompts with which decoding is profiled."""

    target: TargetAdapter
    drafter: JakiroDrafter
    prompts: list[list[int]]
    effort: Effort
    is_quick: bool = False

    @property
    def model(self) -> PreTrainedModel:
        """The target as a Hugging Face model."""
        return self.target.model

    def trained(self) -> TrainedDrafter:
        """Return the drafter with trees of default size that have as many levels as in training."""
        return TrainedDrafter(self.drafter, self.target, default_tree(self.drafter))

    def start(
        self,
        drafter: Drafter | None,
        prompts: list[list[int]],
        new_tokens: int,
        temperature: float = 0.0,
    ) -> DecodeRun:
        """Return a new decoding run over the given prompts.

        Args:
            drafter: drafter; None for autoregressive decoding.
            prompts: token ids of each prompt.
            new_tokens: number of new tokens per prompt.
            temperature: sampling temperature; 0 is greedy.
        """
        return start(self.target, drafter, prompts, new_tokens, temperature)


def start(
    target: TargetAdapter,
    drafter: Drafter | None,
    prompts: list[list[int]],
    new_tokens: int,
    temperature: float = 0.0,
    pipelines: PipelinePool | None = None,
    **generation: Any,
) -> DecodeRun:
    """Return a new decoding run; every step drafts if a drafter is given.

    Args:
        target: the target.
        drafter: drafter; None for autoregressive decoding.
        prompts: token ids of each prompt.
        new_tokens: number of new tokens per prompt.
        temperature: sampling temperature; 0 is greedy.
        pipelines: pool of a run with captured steps; None for a run without them.
        **generation: further arguments of `generate()`, such as `top_p`.
    """
    requests, _ = prepare_requests(
        target.model,
        prompts,
        {"max_new_tokens": new_tokens, **generation},
        temperature=temperature,
        seed=0,
        max_position=target.spec.max_position,
    )
    if pipelines is None:
        return DecodeRun(target, drafter, requests)
    return CapturedRun(target, drafter, requests, pipelines)


def load_target(settings: SubjectSettings) -> PreTrainedModel:
    """Return the target named in the settings; by default, a small Llama with random weights."""
    dtype = TORCH_DTYPES[settings.dtype]
    model: Any
    if settings.target is None:
        model = _random_llama()
        model = model.to(device=settings.device, dtype=dtype).eval()
    else:
        model = load_causal_lm(settings.target, dtype=dtype, device=settings.device)
    model.generation_config.eos_token_id = None  # so that all runs have the same length
    return model


def load_drafter(path: str | None, target: TargetAdapter) -> JakiroDrafter:
    """Return a drafter on the target's device and in the target's dtype.

    Args:
        path: folder of the drafter; None for a random drafter about as large as a target layer.
        target: the target.
    """
    if path is None:
        drafter = _random_drafter(target)
    else:
        drafter = JakiroDrafter.from_pretrained(path)
        check_target(drafter.config.target_record, target.spec)
    return drafter.eval().to(device=target.device, dtype=target.dtype)


def random_prompts(target: TargetAdapter, count: int, length: int) -> list[list[int]]:
    """Return prompts of random tokens, which are the same in every run.

    Args:
        target: target from whose vocabulary the tokens are sampled.
        count: number of prompts.
        length: number of tokens of each prompt.
    """
    source = random.Random(0)
    vocab = target.spec.vocab_size
    return [[source.randrange(vocab) for _ in range(length)] for _ in range(count)]


def build_subject(settings: SubjectSettings, effort: Effort, *, is_quick: bool) -> ProfilingSubject:
    """Return the target, the drafter and random prompts.

    Args:
        settings: names of the target and the drafter.
        effort: numbers of prompts, tokens and repetitions.
        is_quick: whether the run only tests that all measurements work.
    """
    target = TargetAdapter(load_target(settings))
    length = min(PROMPT_TOKENS, target.spec.max_position // 4)
    return ProfilingSubject(
        target=target,
        drafter=load_drafter(settings.drafter, target),
        prompts=random_prompts(target, effort.prompts, length),
        effort=effort,
        is_quick=is_quick,
    )


def _random_llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=12,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
        )
    )


def _random_drafter(target: TargetAdapter) -> JakiroDrafter:
    torch.manual_seed(1)
    config = target.config
    width = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    settings = DrafterSettings(
        trunk=TrunkSettings(kind="moa"),
        memory=MemorySettings(layers=_alike(target.spec), common_width=64),
        experts=ExpertsSettings(num_experts=2, intermediate_size=max(width // 4, 1)),
        schedule=ScheduleSettings(autoregressive_levels=2, parallel_levels=1),
    )
    return JakiroDrafter(config_for(settings, record_target(target.spec, "random")))


def _alike(spec: TargetSpec) -> tuple[int, ...]:
    """Return the indices of the layers whose keys/values are as wide as those of layer 0."""
    return tuple(i for i, width in enumerate(spec.kv_widths) if width == spec.kv_widths[0])


MARGIN = 16  # number of positions that stay free after the new tokens


class PromptSettings(SubjectSettings):
    """Prompts to continue, and the number of new tokens.

    Attributes:
        prompts: file of prompts; None for built-in prompts.
        count: largest number of prompts.
        prompt_tokens: largest number of tokens per prompt, unless the target is a random model;
            only the end of a longer prompt is used.
        new_tokens: number of new tokens per prompt.
    """

    prompts: Path | None = None
    count: PositiveInt
    prompt_tokens: PositiveInt
    new_tokens: PositiveInt


def load_prompts(settings: PromptSettings, target: TargetAdapter) -> list[list[int]]:
    """Return the token ids of the prompts, or random token ids if the target is a random model.

    Args:
        settings: file and number of the prompts.
        target: the target.
    """
    name_or_path = target.model.name_or_path
    if not name_or_path:
        return random_prompts(target, settings.count, PROMPT_TOKENS)
    tokenizer = load_tokenizer(name_or_path, "the tokenizer of the target")
    prompts: Sequence[Prompt] = BUILT_IN
    if settings.prompts is not None:
        prompts = [prompt.first for prompt in read_prompts(settings.prompts)]
    vocab_size = target.spec.vocab_size
    encoded = [encode_prompt(prompt, tokenizer, vocab_size) for prompt in prompts[: settings.count]]
    room = target.spec.max_position - settings.new_tokens - MARGIN
    return [ids[-min(settings.prompt_tokens, room) :] for ids in encoded]
