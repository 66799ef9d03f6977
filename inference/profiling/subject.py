"""Loads the subject of profiling: a target, a drafter of suitable size, and prompts."""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.loop import DecodeRun
from inference.generation.preparation import prepare_requests
from inference.generation.prompt_file import BUILT_IN, read_prompts
from inference.generation.prompts import Prompt, encode_prompt
from inference.protocol import Drafter
from inference.trees.shape import TreePlan
from jakiro.config import (
    DrafterSettings,
    ExpertsSettings,
    MemorySettings,
    TrunkSettings,
    config_for,
)
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter, TargetSpec
from jakiro.target.record import check_target, record_target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROMPT_TOKENS = 64
# Optional folder, beside the checkout, of a target that several programs share.
SHARED_TARGET = Path(__file__).resolve().parents[3] / "shared" / "reference-target"


@dataclass(frozen=True)
class Effort:
    """Amount of measurement."""

    prompts: int
    new_tokens: int
    repeats: int  # repeats of a decoding step or run


@dataclass(frozen=True)
class Subject:
    """A target, a drafter and prompts to profile decoding with."""

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
        """Return the drafter with default trees of its schedule."""
        schedule = self.drafter.config.settings.schedule.model_dump()
        plan = TreePlan()
        shapes = {
            name: shape.model_copy(update=schedule)
            for name, shape in (("greedy", plan.greedy), ("sampling", plan.sampling))
        }
        return TrainedDrafter(self.drafter, self.target, TreePlan(**shapes))

    def start(
        self,
        drafter: Drafter | None,
        prompts: list[list[int]],
        new_tokens: int,
        temperature: float = 0.0,
    ) -> DecodeRun:
        """Return a run over prompts that has not begun.

        Args:
            drafter: drafter; None for autoregressive decoding.
            prompts: token ids of each prompt.
            new_tokens: number of new tokens of each prompt.
            temperature: sampling temperature; 0 is greedy.
        """
        return start(self.target, drafter, prompts, new_tokens, temperature)


def start(
    target: TargetAdapter,
    drafter: Drafter | None,
    prompts: list[list[int]],
    new_tokens: int,
    temperature: float = 0.0,
) -> DecodeRun:
    """Return a run over prompts that has not begun, and drafts in every decoding step.

    Args:
        target: the target.
        drafter: drafter; None for autoregressive decoding.
        prompts: token ids of each prompt.
        new_tokens: number of new tokens of each prompt.
        temperature: sampling temperature; 0 is greedy.
    """
    requests, _ = prepare_requests(
        target.model,
        prompts,
        max_position=target.spec.max_position,
        temperature=temperature,
        max_new_tokens=new_tokens,
        seed=0,
    )
    return DecodeRun(target, drafter, requests)


def add_target_options(parser: argparse.ArgumentParser, dtype: str = "float32") -> None:
    """Add the options of the target.

    Args:
        parser: parser to extend.
        dtype: default of `--dtype`.
    """
    parser.add_argument(
        "--target",
        help="folder or Hub id; by default ../shared/reference-target beside the checkout",
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default=dtype)
    parser.add_argument("--device", default="cpu")


def load_target(options: argparse.Namespace) -> PreTrainedModel:
    """Return the target of `--target`; by default the shared target, or a random Llama."""
    name_or_path = options.target or (str(SHARED_TARGET) if SHARED_TARGET.is_dir() else None)
    dtype = DTYPES[options.dtype]
    model: Any
    if name_or_path is None:
        model = _random_llama()
    else:
        model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
    model.generation_config.eos_token_id = None  # all runs have the same length
    return model.to(device=options.device, dtype=dtype).eval()


def load_drafter(path: str | None, target: TargetAdapter) -> JakiroDrafter:
    """Return a drafter in the target's dtype, on its device.

    Args:
        path: folder of the drafter; None for a random drafter of about the size of a target layer.
        target: the target.
    """
    if path is None:
        drafter = _random_drafter(target)
    else:
        drafter = JakiroDrafter.from_pretrained(path)
        check_target(drafter.config.target_record, target.spec)
    return drafter.eval().to(device=target.device, dtype=target.dtype)


def random_prompts(target: TargetAdapter, count: int, length: int) -> list[list[int]]:
    """Return prompts of random tokens, the same in every run.

    Args:
        target: the target, whose vocabulary the tokens are from.
        count: number of prompts.
        length: number of tokens of each prompt.
    """
    source = random.Random(0)
    vocab = target.spec.vocab_size
    return [[source.randrange(vocab) for _ in range(length)] for _ in range(count)]


def build_subject(options: argparse.Namespace, effort: Effort) -> Subject:
    """Load target, drafter and prompts.

    Args:
        options: parsed command line.
        effort: amount of measurement.
    """
    target = TargetAdapter(load_target(options))
    length = min(PROMPT_TOKENS, target.spec.max_position // 4)
    return Subject(
        target=target,
        drafter=load_drafter(options.drafter, target),
        prompts=random_prompts(target, effort.prompts, length),
        effort=effort,
        is_quick=options.quick,
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
        experts=ExpertsSettings(intermediate_size=max(width // 4, 1)),
    )
    return JakiroDrafter(config_for(settings, record_target(target.spec, "random")))


def _alike(spec: TargetSpec) -> tuple[int, ...]:
    """Return the layers whose keys/values are as wide as those of the first layer."""
    return tuple(i for i, width in enumerate(spec.kv_widths) if width == spec.kv_widths[0])


MARGIN = 16  # positions left after the new tokens
SHARED_PROMPTS = SHARED_TARGET / "prompts-test.jsonl"


def add_prompt_options(parser: argparse.ArgumentParser, count: int, new_tokens: int) -> None:
    """Add the options of the prompts and of the number of new tokens.

    Args:
        parser: parser to extend.
        count: default of `--count`.
        new_tokens: default of `--new-tokens`.
    """
    parser.add_argument(
        "--prompts",
        type=Path,
        help="JSON Lines of objects with a field `prompt`; by default "
        "prompts-test.jsonl of ../shared/reference-target, or built-in prompts",
    )
    parser.add_argument("--count", type=int, default=count, help="number of prompts")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=128,
        help="number of tokens kept from the end of each prompt",
    )
    parser.add_argument("--new-tokens", type=int, default=new_tokens)


def load_prompts(options: argparse.Namespace, target: TargetAdapter) -> list[list[int]]:
    """Return the token ids of the prompts, at random if the target has no tokenizer.

    Args:
        options: parsed command line.
        target: the target.
    """
    name_or_path = target.model.name_or_path
    if not name_or_path:
        return random_prompts(target, options.count, PROMPT_TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    file = options.prompts or (SHARED_PROMPTS if SHARED_PROMPTS.is_file() else None)
    prompts: list[Prompt] = list(BUILT_IN) if file is None else read_prompts(file)
    vocab_size = target.spec.vocab_size
    encoded = [encode_prompt(prompt, tokenizer, vocab_size) for prompt in prompts[: options.count]]
    room = target.spec.max_position - options.new_tokens - MARGIN
    return [ids[-min(options.prompt_tokens, room) :] for ids in encoded]
