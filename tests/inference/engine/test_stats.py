"""The summary of statistics is in words that users understand."""

from collections import Counter

from inference.draft_tree import ROOT, SequenceTree
from inference.engine.stats import DecodeStats


def test_the_summary_names_tokens_drafts_tau_and_speed() -> None:
    stats = DecodeStats(emitted=9, target_forwards=4, accepted=Counter({1: 3, 2: 1}))
    stats.seconds.update(prefill=0.5, total=4.5)
    assert stats.summary == (
        "9 tokens (4 of them drafted), tau 2.00 (tokens per decoding step), 2.0 tokens/s after "
        "0.50 s to read the prompt"
    )


def test_the_metrics_of_vllm_count_steps_with_drafts_by_their_accepted_drafts() -> None:
    stats = DecodeStats(
        emitted=12,
        target_forwards=7,  # two of them without drafts
        accepted=Counter({1: 3, 2: 1}),
        reached=Counter({1: 5, 2: 3}),
        proposed_by_proposer=Counter({0: 9, 1: 1}),
    )
    assert stats.speculative_metrics == {
        "mean_acceptance_length": 1.8,
        "draft_acceptance_rate": 0.4,
        "acceptance_histogram": [2, 2, 1],
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 10,
    }
    assert DecodeStats().speculative_metrics["acceptance_histogram"] == [0]


def test_only_nodes_that_a_token_followed_count_as_reached() -> None:
    children = {ROOT: [0, 1], 0: [2], 2: [3]}
    parent, depth, proposer = [-1, -1, 0, 2], [1, 1, 2, 3], [0, 1, 1, 0]
    tree = SequenceTree([5, 6, 7, 8], parent, depth, [], proposer, {}, children, children)
    whole, cut = DecodeStats(), DecodeStats()
    whole.count(tree, [0, 2], 3)
    cut.count(tree, [0, 2], 1)  # the sequence ended with its first accepted token
    assert (whole.reached, cut.reached) == ({1: 1, 2: 1, 3: 1}, {1: 1})
    assert (whole.accepted, cut.accepted) == ({1: 1, 2: 1}, {1: 1})
    assert (whole.accepted_by_proposer, cut.accepted_by_proposer) == ({0: 1, 1: 1}, {0: 1})
    assert whole.proposed_by_proposer == cut.proposed_by_proposer == {0: 2, 1: 2}
    assert (whole.emitted, cut.emitted) == (3, 1)
