"""One chain of drafts, as decoding drafts it and as training sees it."""

import torch
from helpers.training import one_document
from torch import Tensor
from transformers import LogitsProcessorList

from inference.drafters.trained import TrainedDrafter
from inference.protocol import Budget, Committed
from inference.sampling import Sampling
from inference.tree_shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.mixture import joint_log_probs, posterior_log_weights
from jakiro.target import TargetAdapter, chain_step
from training.drafting import draft_all_positions
from training.target_reader import TargetReader


@torch.no_grad()
def drafted_chain(
    model: JakiroDrafter, target: TargetAdapter, tokens: Tensor, shape: TreeShape
) -> tuple[Tensor, Tensor]:
    """Draft the likeliest chain after `tokens` [1, n], of which the last one is the root.

    Returns its tokens and the logarithms of their probabilities, each given those before it.
    """
    drafter = TrainedDrafter(model, target, shape.model_copy(update={"breadth": 1, "children": 1}))
    length = tokens.shape[1] - 1
    cache = target.new_cache(1, length, drafter.hidden_states)
    output = target.forward(chain_step(tokens[:, :-1], 0), cache)
    session = drafter.open(Sampling(LogitsProcessorList(), do_sample=False), capacity=64)
    memory = drafter.encode(output)
    session.advance(Committed((length,), (length,), tokens[:, :-1], tokens[:, -1:], memory))
    tree = session.propose(Budget(shape.depth), [])
    order = tree.depth[0].argsort()
    scores = tree.score[0, order]
    return tree.token_ids[0, order], scores.diff(prepend=scores.new_zeros(1))


@torch.no_grad()
def trained_chain(
    model: JakiroDrafter, target: TargetAdapter, tokens: Tensor, chain: Tensor, passes: int
) -> Tensor:
    """Return the log-probabilities of `chain` after `tokens`, by one masked pass of training.

    The token at depth d of the first `passes` is drafted at the position of the one before it, at
    distance d from the last verified token; the others are read off the last of these positions.
    """
    every = torch.cat((tokens, chain[None]), dim=1)
    root = tokens.shape[1] - 1
    batch = one_document(every, torch.arange(every.shape[1]).clamp(max=root - 1))
    view = TargetReader(target, model, every.shape[1], torch.float32).view(batch)
    output = next(iter(draft_all_positions(model, view, batch)))
    found = []
    weights = output.log_weights[0, root]
    for depth, token in enumerate(chain.tolist()):
        place = root + min(depth, passes - 1)
        level = max(0, depth - passes + 1)
        if not level:
            weights = output.log_weights[0, place]
        joint = joint_log_probs(target.logits(output.features[0, place, level]), weights)
        found.append(joint[:, token].logsumexp(dim=0))
        weights = posterior_log_weights(joint[:, token], weights)
    return torch.stack(found)
