"""The draft trees that a method asks for; where costs decide, prompts that nothing reports on."""

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
_LONGEST = 48  # tokens decoded of each with each tree


@dataclass(frozen=True)
class Trial:
    """What trees are chosen on.

    Attributes:
        prompts: none of which is measured; of a dialogue, its first turn.
        temperature: that trees of random decoding are chosen at; 0 if there is none.
        max_new_tokens: longest answer in the comparison.
    """

    prompts: Sequence[BenchPrompt] = ()
    temperature: float = 1.0
    max_new_tokens: int = _LONGEST

    def plan(
        self, name: MethodName, decoder: SpeculativeDecoder, drafter: JakiroDrafter
    ) -> TreePlan | Literal["auto"] | None:
        """Return the trees of a method; None for those of the drafter's training.

        Args:
            name: of the method.
            decoder: with the drafter, which therefore fits the target.
            drafter: of the method.

        Raises:
            ConfigError: costs shall choose, but there are no prompts.
        """
        if name.tree == "auto":
            return "auto"
        if name.candidates == "costs":
            return self._by_costs(name, decoder, drafter)
        if name.candidates is None and name.tree != "chosen":
            return None
        plan = _sized(name, drafter)
        return TreePlan.of(plan.greedy) if name.tree == "chosen" else plan

    def note(self, name: MethodName) -> str:
        """Return what a reader should know of a method's trees."""
        if name.candidates != "costs":
            return ""
        told = (
            f"its trees are those that pay best by measured costs on {len(self.prompts)} prompts "
            "of the file, which are not measured"
        )
        return (
            f"{told}; the drawn text was at T = {self.temperature:g}" if self.temperature else told
        )

    def _by_costs(
        self, name: MethodName, decoder: SpeculativeDecoder, drafter: JakiroDrafter
    ) -> TreePlan:
        if not self.prompts:
            raise ConfigError(
                "there is nothing to choose trees on",
                expected="prompts that are not measured, with candidates=costs",
                got="none",
                remedy="give build_methods what trial_for returns",
            )
        target, tokenizer = decoder.target, decoder.tokenizer
        vocab_size = target.spec.vocab_size
        return choose_plan(
            target,
            drafter,
            [encode_prompt(one.first, tokenizer, vocab_size) for one in self.prompts],
            temperature=self.temperature,
            max_new_tokens=min(_LONGEST, self.max_new_tokens),
            sampled=name.tree != "chosen" and self.temperature > 0,
            costs=known_costs(target, drafter),
        ).plan


def _sized(name: MethodName, drafter: JakiroDrafter) -> TreePlan:
    if not isinstance(name.candidates, int):
        return default_tree(drafter)
    return trees_of_size(drafter, name.candidates, name.levels)
