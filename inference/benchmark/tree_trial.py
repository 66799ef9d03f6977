"""Draft trees of a method; measured costs select them on prompts that are not reported."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from inference.autotune.costs import known_costs
from inference.autotune.search import choose_plan, trees_of_size
from inference.benchmark.method_names import MethodName
from inference.decoder import SpeculativeDecoder
from inference.drafters.trained.drafter import default_tree
from inference.generation.prompt_file import BenchPrompt
from inference.generation.prompts import encode_prompt
from inference.trees.shape import TreePlan
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError

TRIAL_PROMPTS = 4
_LONGEST = 48  # tokens decoded of each prompt with each tree


@dataclass(frozen=True)
class Trial:
    """Prompts and settings that trees are selected with.

    Attributes:
        prompts: prompts that are not measured; only the first chat turn of a dialogue is used.
        temperature: temperature that trees for sampling are selected at; 0 if all is greedy.
        max_new_tokens: largest number of new tokens of an answer in the comparison.
    """

    prompts: Sequence[BenchPrompt] = ()
    temperature: float = 1.0
    max_new_tokens: int = _LONGEST

    def plan(
        self, name: MethodName, decoder: SpeculativeDecoder, drafter: JakiroDrafter
    ) -> TreePlan | Literal["auto"] | None:
        """Return the trees of a method; None for those of the drafter's training.

        Args:
            name: parsed name of the method.
            decoder: decoder with the drafter, which therefore fits the target.
            drafter: drafter of the method.

        Raises:
            ConfigError: the method has candidates=costs, but there are no prompts.
        """
        if name.tree == "auto":
            return "auto"
        if name.candidates == "costs":
            return self._by_costs(name, decoder, drafter)
        if name.candidates is None and name.tree != "deterministic":
            return None
        plan = _sized(name, drafter)
        return TreePlan.of(plan.greedy) if name.tree == "deterministic" else plan

    def note(self, name: MethodName) -> str:
        """Return a remark on how a method's trees were selected; empty without costs."""
        if name.candidates != "costs":
            return ""
        note = (
            f"its trees are those that pay best by measured costs on {len(self.prompts)} prompts "
            "of the file, which are not measured"
        )
        sampled = f"; sampled text was at T = {self.temperature:g}" if self.temperature else ""
        return note + sampled

    def _by_costs(
        self, name: MethodName, decoder: SpeculativeDecoder, drafter: JakiroDrafter
    ) -> TreePlan:
        if not self.prompts:
            raise ConfigError(
                "there are no prompts to select trees on",
                expected="prompts that are not measured, with candidates=costs",
                got="none",
                remedy="pass the result of trial_for to build_methods",
            )
        target, tokenizer = decoder.target, decoder.tokenizer
        vocab_size = target.spec.vocab_size
        return choose_plan(
            target,
            drafter,
            [encode_prompt(prompt.first, tokenizer, vocab_size) for prompt in self.prompts],
            temperature=self.temperature,
            max_new_tokens=min(_LONGEST, self.max_new_tokens),
            sampled=name.tree != "deterministic" and self.temperature > 0,
            costs=known_costs(target, drafter),
        ).plan


def _sized(name: MethodName, drafter: JakiroDrafter) -> TreePlan:
    if not isinstance(name.candidates, int):
        return default_tree(drafter)
    return trees_of_size(drafter, name.candidates, name.levels)
