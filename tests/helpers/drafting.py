"""Compares the predictions of decoding with those of training at the same positions."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers.tables import frontier_of
from helpers.training import one_document
from torch import Tensor
from transformers import LogitsProcessorList

from inference.drafters.trained.drafter import TrainedDrafter, TrainedSession
from inference.drafters.trained.tree_pass import TreePass
from inference.protocol import Budget, Committed, EncodedMemory
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.builder import TreeLevel
from inference.trees.shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.experts import ExpertsOutput, posterior_log_weights
from jakiro.target.adapter import TargetAdapter
from jakiro.target.step import StepOutput, chain_step
from training.loss.anchors import ttt_anchors
from training.loss.drafting import draft_all_positions
from training.module import TargetReader

GREEDY = Sampling(LogitsProcessorList(), do_sample=False)


def committed(tokens: Tensor, start: int, end: int, memory: EncodedMemory) -> Committed:
    """Return a commit of the tokens from `start` to before `end`; token `end` becomes the root."""
    return commit_of((end,), (end - start,), tokens[:, start:end], tokens[:, end : end + 1], memory)


def commit_of(
    base_length: tuple[int, ...],
    num_verified: tuple[int, ...],
    token_ids: Tensor,
    root: Tensor,
    memory: EncodedMemory | None = None,
) -> Committed:
    """Return a commit whose positions on the device follow from those on the host."""
    end = torch.tensor(base_length)
    start = end - torch.tensor(num_verified)
    is_padded = min(num_verified) < token_ids.shape[1]
    return Committed(base_length, num_verified, token_ids, root, start, end, is_padded, memory)


def prefilled(
    drafter: TrainedDrafter, tokens: Tensor, length: int, sampling: Sampling = GREEDY
) -> tuple[TrainedSession, StepOutput]:
    """Return a session with `length` verified tokens, and the target's output for these tokens."""
    target = drafter.target
    capacity = max(64, length + 32)
    cache = target.new_cache(1, capacity, drafter.hidden_states)
    output = target.forward(chain_step(tokens[:, :length], 0), cache)
    session = drafter.new_session(sampling, capacity=capacity)
    memory = drafter.encode_memory(output, torch.arange(length)[None])
    session.advance(committed(tokens, 0, length, memory))
    return session, output


def trained_outputs(
    target: TargetAdapter, model: JakiroDrafter, tokens: Tensor, length: int, depth: int
) -> list[ExpertsOutput]:
    """Return training's predictions at the distances 1 to `depth` from the last verified token."""
    count = tokens.shape[1]
    if model.config.settings.trunk.reads_features or model.config.settings.trunk.is_block:
        starts = np.zeros(count, np.int64)
        several = [torch.from_numpy(ttt_anchors(starts, 1 + draw)) for draw in range(depth)]
        anchors = torch.stack(several)
    else:  # one pass has all distances: position length + d - 1 is d after its anchor
        anchors = torch.arange(count).clamp(max=length - 1)
    batch = one_document(tokens, anchors)
    reader = TargetReader(target, model, count, torch.float32)
    view = reader.view(batch)
    outputs = list(draft_all_positions(model, view, batch, reader.tail))
    return outputs if len(outputs) > 1 else outputs * depth


def assert_training_equals_drafting(
    target: TargetAdapter, model: JakiroDrafter, length: int, depth: int
) -> None:
    """Check that training's masked pass equals cached drafting at each depth of one path."""
    if model.config.settings.trunk.is_block:
        depth = 1
    parallel = model.config.settings.schedule.parallel_levels
    # The ids of the draft vocabulary of these drafters are the first ids, which are also columns.
    most = target.spec.vocab_size if model.draft_ids is None else len(model.draft_ids)
    tokens = torch.randint(0, most, (1, length + depth + parallel))
    trained = trained_outputs(target, model, tokens, length, depth)
    shape = TreeShape(autoregressive_levels=depth, parallel_levels=parallel, breadth=1)
    drafter = TrainedDrafter(model, target, shape)
    source = prefilled(drafter, tokens, length)[0].start_tree()
    weights = trained[0].log_weights
    for step in range(1, depth + parallel + 1):
        frontier = None if step == 1 else chain_frontier(int(tokens[0, length + step - 1]))
        got = source.joint(step, frontier)
        level, pass_ = max(0, step - depth), min(step, depth)
        output, position = trained[pass_ - 1], length + pass_ - 1
        logits = drafter.head.logits(output.features[:, position : position + 1, level])
        if model.path_tables is not None:
            parent = tokens[:, length + step - 1 : length + step]
            logits = logits + model.path_tables(parent).unsqueeze(2)
        log_probs = logits.log_softmax(dim=-1)
        prior = weights if level else output.log_weights[:, position : position + 1]
        expected = log_probs + prior.unsqueeze(-1)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        if step >= depth:
            follows = tokens[0, min(length + step, tokens.shape[1] - 1)]
            weights = posterior_log_weights(expected[..., follows], prior)


def assert_tree_equals_paths(
    target: TargetAdapter, model: JakiroDrafter, length: int, passes: int
) -> None:
    """Check that each node of a tree has the score of its path when drafted as a chain."""
    parallel = model.config.settings.schedule.parallel_levels
    levels = {"autoregressive_levels": passes, "parallel_levels": parallel}
    shape = TreeShape(**levels, breadth=3, children=3, num_nodes=99)
    tokens = torch.randint(0, target.spec.vocab_size, (1, length + 1))
    session, _ = prefilled(TrainedDrafter(model, target, shape), tokens, length)
    tree = session.propose(Budget(99), StepRandom())
    own = tree.sequence_tree()
    assert tree.num_nodes == 3 + 9 * (passes + parallel - 1)
    linear = TrainedDrafter(model, target, TreeShape(**levels, breadth=1))
    fresh, _ = prefilled(linear, tokens, length)
    for node in range(tree.num_nodes):
        path = [own.token_ids[index] for index in own.path(node)]
        expected = score_of_path(fresh.start_tree(), path)
        assert tree.score[0, node].item() == pytest.approx(expected, abs=1e-4)


def score_of_path(source: TreePass, path: Sequence[int]) -> float:
    """Return the log-probability of a path under the drafter."""
    score, frontier = 0.0, None
    for depth, token in enumerate(path, start=1):
        joint = source.joint(depth, frontier)
        score += joint[0, 0, :, token].logsumexp(0).item()
        frontier = chain_frontier(token)
    return score


def chain_frontier(token: int) -> TreeLevel:
    """Return a frontier of one token, whose parent is the only node of the previous frontier."""
    return frontier_of(torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.long))
