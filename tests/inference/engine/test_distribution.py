"""Tests of the target's processed distributions."""

import torch
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from inference.draft_tree import ROOT, SequenceTree
from inference.engine.acceptance import ProcessedDistribution
from inference.sampling.options import Sampling

# A root with the child 0, which has the child 1.
TREE = SequenceTree(
    token_ids=[2, 3],
    parent=[ROOT, 0],
    depth=[1, 2],
    rank=[0, 0],
    proposer_id=[0, 0],
    sampled={},
    deterministic={ROOT: [0], 0: [1]},
    children={ROOT: [0], 0: [1]},
)


def _logits() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 5)


def test_processors_read_the_emitted_tokens_and_the_path_but_no_later_tokens() -> None:
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])
    emitted, logits = [4], _logits()
    probs = ProcessedDistribution(logits, emitted, TREE, Sampling(processors, do_sample=True))
    emitted.append(0)  # emitted after the distributions were made
    for node, seen in ((ROOT, {4}), (0, {4, 2}), (1, {4, 2, 3})):
        changed = probs.scores(node) != logits[node + 1]
        assert set(changed.nonzero().flatten().tolist()) == seen
