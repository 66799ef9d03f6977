"""The expected accepted length of drafted trees, as a term of the training objective.

Let a tree have k candidates below each node, each sampled from the draft distribution there; equal
candidates are one node. The target's continuation x_1, x_2, ... is sampled, independently of the
tree, and decoding accepts the longest prefix of it that is a path of the tree. Given the prefix,
the candidates below it contain x_d with the probability

    a_d = 1 - (1 - q_d(x_d | x_1, ..., x_{d-1}))^k,

and samples below different nodes are independent. So the first d tokens are accepted with the
probability a_1 a_2 ... a_d, and the expected number of accepted tokens is

    L = E[a_1 + a_1 a_2 + a_1 a_2 a_3 + ...],

where the expectation is over continuations. A text that the target has written is a sample of them,
so the sum in brackets, computed for this text, is an unbiased estimate of L, with a gradient
through every q_d. The weight of the gradient of q_d is the probability that depth d is reached,
times the length that is expected from there on: early tokens count for more, and a token counts
only if those before it are drafted as well.

With experts, q_d is the mixture whose weights are conditioned on x_1, ..., x_{d-1}.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jakiro.experts import ExpertsOutput, joint_log_probs, posterior_log_weights
from training.loss.anchors import AnchorRule
from training.loss.batch import Batch, gather_examples
from training.loss.heads import Heads
from training.loss.objectives import LossTerms, on_batch
from training.loss.settings import ObjectiveSettings
from training.loss.vocab_losses import at_token


def expected_accepted_length(
    log_probs: Float[Tensor, "n depths"], exists: Bool[Tensor, "n depths"], children: int
) -> Float[Tensor, " n"]:
    """Return `a_1 + a_1 a_2 + ...` for each of n texts."""
    hit = 1 - (1 - log_probs.exp().clamp(max=1)).pow(children)
    return torch.where(exists, hit, 0).cumprod(dim=1).sum(dim=1)


def text_log_probs(
    output: ExpertsOutput, sample: int, batch: Batch, heads: Heads, chunk_size: int
) -> Float[Tensor, "batch length levels"]:
    """Return the draft log-probability of the text's next token at each position and level.

    The distributions of only one chunk of positions are in memory at a time, because the backward
    pass computes them again.
    """
    # No value depends on the target's features.
    examples = gather_examples(output, output.features[:, :, 0, 0], batch, sample, 1.0)
    parts = (examples.features, examples.log_weights, examples.next_tokens)
    chunks = zip(*(part.split(chunk_size) for part in parts), strict=True)
    again: Any = partial(checkpoint, _chunk, heads, use_reentrant=False, preserve_rng_state=False)
    return on_batch(torch.cat([again(*chunk) for chunk in chunks]), examples, batch)


def _chunk(heads: Heads, features: Tensor, log_weights: Tensor, next_tokens: Tensor) -> Tensor:
    weights, levels = log_weights.float(), []
    for level in range(features.shape[1]):
        joint = joint_log_probs(heads.draft(features[:, level]), weights)
        of_text = at_token(joint, next_tokens[:, level], heads.token_ids)
        # Without a draft of the token, there is neither a probability nor a gradient.
        absent = of_text.isneginf().all(dim=1)
        safe = torch.where(absent[:, None], 0.0, of_text)
        levels.append(torch.where(absent, float("-inf"), safe.logsumexp(dim=1)))
        weights = posterior_log_weights(of_text, weights)
    return torch.stack(levels, dim=1)


def draft_paths(
    samples: Sequence[Float[Tensor, "batch length levels"]], batch: Batch, crosses_samples: bool
) -> list[tuple[Float[Tensor, "n depths"], Bool[Tensor, "n depths"]]]:
    """Return values along the draft path below each position, and whether each depth exists.

    If sample s drafts at the distance s + 1 from the last verified token, as in a rollout, there is
    one path for all samples. With two samples and one parallel level, it consists of

        depth           1                2                    3
        sample          0, at i          1, at i + 1          1, at i + 1
        level           0                0                    1

    With other anchors, those of neighboring positions differ, so that a path consists only of the
    levels of one position, and each sample has paths of its own.
    """
    trees = [samples] if crosses_samples else [[sample] for sample in samples]
    paths = []
    for sample, passes in enumerate(trees):
        last = len(passes) - 1
        depths = [one[..., :1].roll(-step, dims=1) for step, one in enumerate(passes[:-1])]
        path = torch.cat([*depths, passes[-1].roll(-last, dims=1)], dim=2)
        exists = torch.stack([batch.targets_exist(1 + d) for d in range(path.shape[2])], dim=2)
        index = torch.arange(path.shape[1], device=path.device)
        exists = exists & (index > batch.anchors[:, sample])[..., None]
        paths.append((path.flatten(0, 1), exists.flatten(0, 1)))
    return paths


def num_depths(rule: AnchorRule, num_levels: int) -> int:
    """Return the number of depths of the draft paths in batches with such anchors."""
    return num_levels + (rule.num_samples - 1 if rule.kind == "ttt" else 0)


def with_accept_rates(
    terms: LossTerms,
    accept: Sequence[Float[Tensor, "batch length levels"]],
    batch: Batch,
    crosses_samples: bool,
) -> LossTerms:
    """Return the loss terms with the acceptance along draft paths.

    With one candidate at each depth, sampled from the draft distribution, a step of decoding yields
    1 + a_1 + a_1 a_2 + ... tokens in expectation, where a_d is the probability that the candidate
    at depth d of the path is accepted, and the text stands for the accepted tokens. A path ends
    before the first depth that does not exist. Only paths of full length count for the tokens of a
    step.
    """
    paths = draft_paths(accept, batch, crosses_samples)
    probs, exists = (torch.cat(column) for column in zip(*paths, strict=True))
    exists = exists.cumprod(dim=1).bool()
    probs = torch.where(exists, probs, 0.0)
    tokens = 1 + probs.cumprod(dim=1).sum(dim=1)
    return terms._replace(
        accept=probs.sum(dim=0),
        depth_count=exists.sum(dim=0).float(),
        path_tokens=torch.where(exists[:, -1], tokens, 0.0).sum(),
    )


def with_accepted_length(
    terms: LossTerms,
    samples: Sequence[Float[Tensor, "batch length levels"]],
    batch: Batch,
    settings: ObjectiveSettings,
    crosses_samples: bool,
) -> LossTerms:
    """Return the loss terms, from which the expected accepted length is subtracted."""
    paths = draft_paths(samples, batch, crosses_samples)
    lengths = [expected_accepted_length(*path, settings.accepted_length_children) for path in paths]
    total = torch.stack(lengths).sum()
    # The step divides by the number of positions of all samples, several of which a tree spans.
    weight = settings.accepted_length_weight * len(samples) / len(paths)
    return terms._replace(
        total=terms.total - weight * total,
        accepted_length=total.detach(),
        num_trees=torch.stack([exists[:, 0] for _, exists in paths]).sum().float(),
    )
