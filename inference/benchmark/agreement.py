"""Agreement of a drafter with its target, and tau, measured on a few hundred greedy tokens."""

from collections import Counter
from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.decoder import SpeculativeDecoder
from inference.engine.stats import DecodeStats
from inference.generation.prompts import Prompt
from inference.trees.shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.utils.settings import Settings


class Agreement(Settings):
    """Measurements of a drafter on greedy continuations.

    Attributes:
        agreement: share of the decoding steps in which the drafter's most likely next token is the
            target's.
        floor: share of the most frequent token among all decoded tokens, which a drafter that
            always drafts this token reaches.
        chain_tau: mean acceptance length (tau) with a chain of most likely tokens.
        tau: tau with draft trees of the default size.
    """

    agreement: float
    floor: float
    chain_tau: float
    tau: float
    num_steps: int
    num_prompts: int

    @property
    def is_above_floor(self) -> bool:
        """Whether the drafter agrees with the target more often than the most frequent token."""
        return self.agreement > self.floor

    def __str__(self) -> str:
        """Return one line for users."""
        return (
            f"agreement {self.agreement:.1%} (the most frequent token alone: {self.floor:.1%}), "
            f"tau {self.tau:.2f} with trees and {self.chain_tau:.2f} with chains, in "
            f"{self.num_steps} decoding steps over {self.num_prompts} prompts"
        )


def measure_agreement(
    target: PreTrainedModel,
    drafter: JakiroDrafter,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
) -> Agreement:
    """Return the agreement of a drafter with its target, and tau, in greedy decoding."""
    schedule = drafter.config.settings.schedule
    chain = TreeShape(**drafter.levels, children=1, breadth=1, num_nodes=schedule.depth)
    results = []
    tokens: Counter[int] = Counter()
    for tree in (chain, "fixed"):
        decoder = SpeculativeDecoder(target, drafter, tokenizer, tree)
        outputs = [
            decoder.generate(prompt, temperature=0.0, max_new_tokens=max_new_tokens)
            for prompt in prompts
        ]
        results.append(DecodeStats.pooled(output.stats for output in outputs))
        tokens.update(token for output in outputs for token in output.new_token_ids)
    in_chains, in_trees = results
    return Agreement(
        agreement=in_chains.accepted[1] / max(in_chains.reached[1], 1),
        floor=max(tokens.values(), default=0) / max(tokens.total(), 1),
        chain_tau=in_chains.tau,
        tau=in_trees.tau,
        num_steps=in_chains.target_forwards,
        num_prompts=len(prompts),
    )
