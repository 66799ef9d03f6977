"""The public decoder: any Hugging Face causal LM, unmodified, and a drafter that speeds it up."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from inference.drafters.trained import TrainedDrafter
from inference.engine import DecodeRun, Round
from inference.preparation import Prompt, encode_prompt, prepare
from inference.stats import DecodeStats
from inference.streaming import TextStream
from inference.tree_builder import TreePlan, TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError, PromptError
from jakiro.target import TargetAdapter
from jakiro.target_record import check_target, check_tokenizer


@dataclass(frozen=True)
class GenerateOutput:
    """A finished generation."""

    sequences: Int[Tensor, "1 tokens"]  # prompt and continuation
    new_token_ids: list[int]
    depths: list[int]  # how each new token was won: depth in the draft tree, or 0 by the target
    text: str | None  # of the continuation; None without a tokenizer
    stats: DecodeStats


class SpeculativeDecoder:
    """Generates exactly as the target alone would, only faster.

    Greedy output equals the target's greedy output; sampled output follows the target's processed
    law. The decoder holds no request's state, so threads may share it. It puts the target into
    evaluation mode, and the drafter onto the target's device and dtype.

    Args:
        target: any decoder-only Hugging Face causal LM; its weights are never changed.
        drafter: a drafter trained for it, or None for plain decoding.
        tokenizer: for text prompts and text output; by default the one in the place of the target
            that the drafter names, if it is there.
        tree: how draft trees grow, one shape or a plan for greedy and random decoding; by default
            of the schedule that the drafter was trained for.

    Raises:
        TargetMismatch: drafter or tokenizer belong to another target.
        TargetNotSupported: the target cannot be verified over a tree.
        ConfigError: the tree asks for more than the drafter has.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: JakiroDrafter | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        tree: TreeShape | TreePlan | None = None,
    ) -> None:
        self.target = TargetAdapter(target.eval())
        self.tokenizer = tokenizer
        self.drafter: TrainedDrafter | None = None
        if drafter is not None and tokenizer is None:
            self.tokenizer = _tokenizer_at(drafter.config.target_record.name_or_path)
        if drafter is not None:
            check_target(drafter.config.target_record, self.target.spec)
            if self.tokenizer is not None:
                check_tokenizer(drafter.config.target_record, self.tokenizer)
            model = drafter.eval().to(device=self.target.device, dtype=self.target.dtype)
            self.drafter = TrainedDrafter(model, self.target, tree or default_tree(drafter))

    @classmethod
    def from_pretrained(
        cls,
        drafter: str | Path,
        target: str | Path | None = None,
        tree: TreeShape | TreePlan | None = None,
        **load: Any,
    ) -> "SpeculativeDecoder":
        """Load a drafter, and the target and tokenizer that it was trained for.

        Args:
            drafter: folder or hub name of the drafter.
            target: where the target is now, if not where the drafter's config says.
            tree: see the class.
            **load: for `AutoModelForCausalLM.from_pretrained`, such as dtype or device_map.

        Raises:
            CheckpointError: drafter or target cannot be loaded.
            TargetMismatch: the target or its tokenizer is not the one of the drafter.
        """
        model = JakiroDrafter.from_pretrained(drafter)
        place = str(target or model.config.target_record.name_or_path)
        try:
            target_model = AutoModelForCausalLM.from_pretrained(place, **load)
            tokenizer = AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"cannot load the target {place}",
                expected="the target that the drafter was trained for",
                got=str(error).strip().splitlines()[0],
                remedy="pass target= with the place where it is now",
            ) from error
        return cls(target_model, model, tokenizer, tree)

    def generate(
        self, prompt: Prompt, *, temperature: float = 0.0, seed: int = 0, **generation: Any
    ) -> GenerateOutput:
        """Return the continuation of a prompt.

        Args:
            prompt: text, chat messages, or token ids.
            temperature: 0 is greedy.
            seed: key of every random number; the same seed gives the same output.
            **generation: `GenerationConfig` fields (max_new_tokens, top_k, top_p, ...); defaults
                are those of `target.generate()`.

        Raises:
            PromptError: the prompt or an argument cannot be used.
        """
        run = self._run(prompt, temperature, seed, generation)
        rounds = list(run)
        new = [token for one in rounds for token in one.token_ids]
        return GenerateOutput(
            sequences=torch.tensor([run.token_ids]),
            new_token_ids=new,
            depths=[depth for one in rounds for depth in one.depths],
            text=self._decode(new),
            stats=run.stats,
        )

    def stream(
        self, prompt: Prompt, *, temperature: float = 0.0, seed: int = 0, **generation: Any
    ) -> Iterator[str]:
        """Yield the continuation's text as soon as it is certain; arguments as for `generate`.

        Raises:
            PromptError: as for `generate`, or the decoder has no tokenizer.
        """
        run = self._run(prompt, temperature, seed, generation)
        if self.tokenizer is None:
            raise PromptError("streaming text needs a tokenizer", remedy="pass tokenizer=")
        return _pieces(run, TextStream(self.tokenizer))

    def rounds(
        self, prompt: Prompt, *, temperature: float = 0.0, seed: int = 0, **generation: Any
    ) -> Iterator[Round]:
        """Yield tokens in the groups that became certain together; arguments as for `generate`."""
        return iter(self._run(prompt, temperature, seed, generation))

    def _run(
        self, prompt: Prompt, temperature: float, seed: int, generation: dict[str, Any]
    ) -> DecodeRun:
        input_ids = encode_prompt(prompt, self.tokenizer, self.target.device)
        request = prepare(
            self.target.model,
            input_ids,
            temperature,
            seed,
            self.target.spec.max_position,
            self.tokenizer,
            **generation,
        )
        return DecodeRun(self.target, self.drafter, request)

    def _decode(self, token_ids: list[int]) -> str | None:
        if self.tokenizer is None:
            return None
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def _tokenizer_at(place: str) -> PreTrainedTokenizerBase | None:
    try:
        return AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError):
        return None


def default_tree(drafter: JakiroDrafter) -> TreePlan:
    """Return trees of the schedule that the drafter was trained for."""
    schedule = drafter.config.settings.schedule.model_dump()
    defaults = TreePlan()
    return TreePlan(
        greedy=defaults.greedy.model_copy(update=schedule),
        sampling=defaults.sampling.model_copy(update=schedule),
    )


def _pieces(run: DecodeRun, stream: TextStream) -> Iterator[str]:
    for step in run:
        if piece := stream.push(step.token_ids):
            yield piece
    if rest := stream.flush():
        yield rest
