"""Check that a target has the rounding of `generate()`, whatever is computed with a token."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from jakiro.errors import TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.batch_invariance import example, read_in_tree, read_one_by_one
from jakiro.target.cache_argument import cache_argument
from jakiro.target.step import chain_step


@torch.no_grad()
def generated_logits(
    target: TargetAdapter, token_ids: Int[Tensor, "1 tokens"], prefix: int
) -> Float[Tensor, "1 steps vocab"]:
    """Return the model's own logits after a prefix and after each later token.

    The model reads the prefix in one forward pass, and then token by token, as `generate()` does.

    Args:
        target: adapter of the target.
        token_ids: tokens of the prefix and after it.
        prefix: number of tokens of the prefix.
    """
    model: Any = target.model
    kept = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    cache, logits = DynamicCache(config=target.config), []
    ends = range(prefix, token_ids.shape[1] + 1)
    for begin, end in zip((0, *ends), ends, strict=False):
        own = {cache_argument(model): cache, **kept}
        output = model(input_ids=token_ids[:, begin:end], use_cache=True, **own)
        logits.append(output.logits[:, -1:])
    return torch.cat(logits, dim=1)


@torch.no_grad()
def check_like_generate(target: TargetAdapter, expected: Float[Tensor, "1 steps vocab"]) -> None:
    """Compare logits, bit for bit, with those of the model's own steps.

    The target reads a prefix, and then a path: token by token, and in a tree with siblings.

    Args:
        target: adapter of the target, after `make_like_generate`.
        expected: `generated_logits` of `example`.

    Raises:
        TargetNotSupported: logits differ.
    """
    token_ids, prefix = example(target)
    cache = target.new_cache(1, prefix)
    read = target.forward(chain_step(token_ids[:, :prefix], 0), cache).features
    single = read_one_by_one(target, token_ids, prefix)
    tree = read_in_tree(target, token_ids, prefix)
    found = {
        "a prompt": target.logits(read[:, -1:]),
        "single tokens": torch.cat([target.logits(own) for own in single.split(1, dim=1)], dim=1),
        "a tree": target.logits(tree),
    }
    for what, logits in found.items():
        own = expected[:, :1] if what == "a prompt" else expected[:, 1:]
        if not torch.equal(logits, own):
            raise TargetNotSupported(
                "the target cannot have the rounding of generate() on this machine",
                expected="the same bits as in the model's own steps",
                got=f"different logits of {what}, in {str(target.dtype).removeprefix('torch.')}",
                remedy="decode without like_generate, or with torch's number of threads",
            )
