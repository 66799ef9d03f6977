"""Selection of a method's draft trees, by measured costs on prompts excluded from the results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from inference.autotune.costs import costs_with
from inference.autotune.search import choose_plan, trees_of_size
from inference.benchmark.method_names import MethodName
from inference.decoder import SpeculativeDecoder
from inference.drafters.trained.drafter import default_tree
from inference.engine.threads import num_threads
from inference.generation.prompt_file import BenchPrompt
from inference.generation.prompts import encode_prompt
from inference.trees.shape import TreePlan
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError

TRIAL_PROMPTS = 4
_LONGEST = 48  # largest number of tokens to decode for each prompt with each tree


@dataclass(frozen=True)
class Trial:
    """Prompts and settings for the selection of trees.

    Attributes:
        prompts: prompts that are not measured; only the first chat turn of a dialogue is used.
        temperature: temperature at which trees for sampling are selected; 0 if all decoding is
            greedy.
        max_new_tokens: largest number of new tokens per answer in the comparison.
    """

    prompts: Sequence[BenchPrompt] = ()
    temperature: float = 1.0
    max_new_tokens: int = _LONGEST

    def tree(
        self, name: MethodName, decoder: SpeculativeDecoder, drafter: JakiroDrafter
    ) -> TreePlan | Literal["auto", "fixed"]:
        """Return the trees of a method.

        Args:
            name: parsed name of the method.
            decoder: decoder of the target with this drafter.
            drafter: drafter of the method.

        Raises:
            ConfigError: candidates=costs is set for the method, but there are no prompts.
        """
        if name.tree == "auto":
            return "auto"
        if name.candidates == "costs":
            return self._by_costs(name, decoder, drafter)
        if name.candidates is None and name.tree != "deterministic":
            return "fixed"
        plan = _sized(name, drafter)
        return TreePlan.of(plan.greedy) if name.tree == "deterministic" else plan

    def note(self, name: MethodName) -> str:
        """Return a remark on the selection of trees by measured costs; empty for other methods."""
        if name.candidates != "costs":
            return ""
        note = (
            f"its trees were selected on {len(self.prompts)} other prompts of the prompt file, by "
            "measured costs; these prompts are excluded from the results"
        )
        sampled = (
            f"; trees for sampling were selected at T = {self.temperature:g}"
            if self.temperature
            else ""
        )
        return note + sampled

    def _by_costs(
        self, name: MethodName, decoder: SpeculativeDecoder, drafter: JakiroDrafter
    ) -> TreePlan:
        if not self.prompts:
            raise ConfigError(
                "there are no prompts to select trees on, although candidates=costs needs them",
                expected="prompts that are not measured",
                got="none",
                remedy="pass the result of trial_for to build_methods",
            )
        target, tokenizer = decoder.target, decoder.tokenizer
        vocab_size = target.spec.vocab_size
        with num_threads(decoder.compute.threads):
            costs = costs_with(target, decoder.drafter)
        return choose_plan(
            target,
            drafter,
            [encode_prompt(prompt.first, tokenizer, vocab_size) for prompt in self.prompts],
            temperature=self.temperature,
            max_new_tokens=min(_LONGEST, self.max_new_tokens),
            sampled=name.tree != "deterministic" and self.temperature > 0,
            costs=costs,
        ).plan


def _sized(name: MethodName, drafter: JakiroDrafter) -> TreePlan:
    if not isinstance(name.candidates, int):
        return default_tree(drafter)
    return trees_of_size(drafter, name.candidates, name.levels)
