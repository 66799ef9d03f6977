"""Check that a target has the rounding of `generate()`, whatever is computed with a token."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from jakiro.errors import TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.batch_invariance import PATH, PREFIX, read_in_tree


@torch.no_grad()
def check_like_generate(target: TargetAdapter) -> None:
    """Compare features and logits, bit for bit, with those of the model's own steps.

    The model reads a prefix in one forward pass, and then a path token by token, as `generate()`
    does. The target reads the prefix, and then the path in a tree with siblings.

    Args:
        target: adapter of the target, after `make_like_generate`.

    Raises:
        TargetNotSupported: features or logits differ.
    """
    path = min(PATH, target.spec.max_position // 2)
    prefix = min(PREFIX, target.spec.max_position - path)
    token_ids = torch.arange(prefix + path, device=target.device)[None] % target.spec.vocab_size
    expected = _one_by_one(target, token_ids, prefix)
    found = read_in_tree(target, token_ids, prefix)
    head = target.model.get_output_embeddings()
    logits = [target.adjusted(head(own)) for own in expected.split(1, dim=1)]
    for what, own, other in (
        ("features", found, expected),
        ("logits", target.logits(found), torch.cat(logits, dim=1)),
    ):
        if not torch.equal(own, other):
            raise TargetNotSupported(
                "the target cannot round like generate() on this machine",
                expected="the same bits as in steps of a single token",
                got=f"different {what}, in {str(target.dtype).removeprefix('torch.')}",
                remedy="decode without like_generate",
            )


def _one_by_one(
    target: TargetAdapter, token_ids: Int[Tensor, "1 tokens"], prefix: int
) -> Float[Tensor, "1 path hidden"]:
    """Return the features of the tokens after a prefix, from the model's own steps."""
    cache, features = DynamicCache(config=target.config), []
    ends = range(prefix, token_ids.shape[1] + 1)
    for begin, end in zip((0, *ends), ends, strict=False):
        output = target.decoder(
            input_ids=token_ids[:, begin:end],
            position_ids=torch.arange(begin, end, device=target.device)[None],
            use_cache=True,
            **{target.cache_argument: cache},
        )
        features.append(output.last_hidden_state[:, -1:])
    return torch.cat(features[1:], dim=1)
