"""In half precision on a CPU, drafts change neither texts nor logits of batch-invariant targets."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from helpers.families import FAMILIES, tiny_family
from helpers.models import tiny_drafter, tiny_settings
from helpers.products import with_exact_experts
from helpers.quick import mostly_slow
from helpers.variants import FEEDBACK, HYBRID
from torch import Tensor
from transformers import PreTrainedModel

from inference import SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.outputs import GenerateOutput
from inference.trees.shape import TreeShape
from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import TargetNotSupported
from jakiro.target.adapter import TargetAdapter

PROMPTS = ([1, 2, 3, 1, 2], [4 + index % 7 for index in range(23)])
NEW = 24
# Families that are refused, with a part of the message.
REFUSED = {
    "falcon": "attention of FalconForCausalLM, which cannot be replaced",
    "gptj": "attention of GPTJForCausalLM, which cannot be replaced",
    "gpt_oss": "attention with sinks",
}
EQUAL = [name for name in FAMILIES if name not in REFUSED]
# In these families, trunks that read hidden states cannot draft: the states have another shape.
WITHOUT_FEATURES = {"gemma3n", "opt, projected"}
# At least with oneDNN, sums of more than 1,024 products depend on whether there is a single row.
# In rows whose width is no multiple of 64, functions may depend on the position in a tensor.
INNER = 1544
WIDE = {"hidden_size": 160, "intermediate_size": INNER}
WIDE_CHANGES: dict[str, dict[str, Any]] = {
    "gemma3n": {"intermediate_size": [INNER] * 4},
    "opt": {"ffn_dim": INNER, "word_embed_proj_dim": 160},
    "opt, projected": {"ffn_dim": INNER},
    "qwen3_moe": {"moe_intermediate_size": INNER},
    "deepseek_v3": {"moe_intermediate_size": INNER},
}
CHAIN = {"autoregressive_levels": 4, "parallel_levels": 0, "children": 1, "breadth": 1}
BUSHY = {"autoregressive_levels": 3, "parallel_levels": 1, "children": 6, "breadth": 5}

Maker = Callable[[PreTrainedModel, str], tuple[Any, Any]]


def _lookup(tree: str) -> Maker:
    settings = LookupSettings(num_nodes=12, depth=5)
    return lambda model, family: (LookupDrafter(settings), tree)


def _trained(settings: DrafterSettings, tree: Any) -> Maker:
    return lambda model, family: (tiny_drafter(TargetAdapter(model), settings), tree)


def _small(model: PreTrainedModel, family: str) -> tuple[Any, Any]:
    """Draft with the target's own weights in float32, so that most drafts are accepted."""
    settings = SmallLMSettings(depth=4, children=3, breadth=3)
    return SmallLMDrafter(_wide(family), model, settings), "fixed"


# Drafters with their trees.
DRAFTING: dict[str, Maker] = {
    "lookup, fixed": _lookup("fixed"),
    "lookup, auto": _lookup("auto"),
    "small model": _small,
    "feedback, chain": _trained(
        tiny_settings(1, parallel_levels=0, trunk=FEEDBACK), TreeShape(**CHAIN)
    ),
    "moa, bushy": _trained(tiny_settings(common_width=12), TreeShape(num_nodes=40, **BUSHY)),
    "hybrid, auto": _trained(tiny_settings(trunk=HYBRID, common_width=12), "auto"),
}


def _wide(family: str) -> PreTrainedModel:
    return tiny_family(family, **(WIDE | WIDE_CHANGES.get(family, {})))


@cache
def _target(family: str) -> PreTrainedModel:
    """Return a target in bfloat16, with this machine's products if they are batch-invariant."""
    try:
        return SpeculativeDecoder(_wide(family).bfloat16(), batch_invariant=True).target.model
    except TargetNotSupported as error:
        if "on this machine" not in str(error):
            raise
        return with_exact_experts(_wide(family))


def _outputs(
    decoder: SpeculativeDecoder, prompts: Sequence[list[int]] = PROMPTS, count: int = NEW
) -> list[GenerateOutput]:
    return [decoder.generate(own, max_new_tokens=count, output_logits=True) for own in prompts]


@cache
def _undrafted(family: str) -> list[GenerateOutput]:
    return _outputs(SpeculativeDecoder(_target(family), batch_invariant=True))


def _logits(output: GenerateOutput) -> Tensor:
    assert output.logits is not None
    return torch.stack(output.logits)


def _drafted(family: str, drafting: str) -> list[GenerateOutput]:
    model = _target(family)
    drafter, tree = DRAFTING[drafting](model, family)
    return _outputs(SpeculativeDecoder(model, drafter, tree=tree, batch_invariant=True))


def _are_equal(drafted: list[GenerateOutput], undrafted: list[GenerateOutput]) -> bool:
    return all(
        own.new_token_ids == other.new_token_ids and torch.equal(_logits(own), _logits(other))
        for own, other in zip(drafted, undrafted, strict=True)
    )


# A dense family, and one with experts.
QUICK = [("llama, grouped heads", "moa, bushy"), ("mixtral", "small model")]
CASES = [
    (family, drafting)
    for family, drafting in product(EQUAL, DRAFTING)
    if family not in WITHOUT_FEATURES or not drafting.startswith(("feedback", "hybrid"))
]


@pytest.mark.parametrize("case", mostly_slow(CASES, quick=QUICK), ids=": ".join)
def test_texts_and_logits_are_those_without_drafts(case: tuple[str, str]) -> None:
    family, drafting = case
    drafted = _drafted(family, drafting)
    assert _are_equal(drafted, _undrafted(family))
    if drafting == "small model":
        assert all(output.stats.tau > 1.5 for output in drafted)


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused(family: str) -> None:
    with pytest.raises(TargetNotSupported, match=REFUSED[family]):
        SpeculativeDecoder(tiny_family(family).bfloat16(), batch_invariant=True)
