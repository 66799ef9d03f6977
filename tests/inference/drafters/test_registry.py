"""Drafters that need no training keep the target's tokens and distribution in every call."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers.drafting import commit_of
from helpers.losslessness import (
    SAMPLES,
    assert_conversation_goes_on,
    assert_follows_distribution,
    greedy_by_transformers,
)
from helpers.models import tiny_llama
from helpers.tables import Tables, no_processors, two_step_error
from transformers import LogitsProcessorList

from inference import SpeculativeDecoder
from inference.draft_tree import CandidateKind, DraftTree
from inference.drafters.aded.drafter import AdedDrafter, AdedSettings
from inference.drafters.candidates import to_tree
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.protocol import Budget, Committed, Drafter, DraftSession
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape

PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 6, 7, 8, 9, 10], [3], [9, 9, 1, 2, 3, 4, 9, 9, 1]]
DRAFTERS: dict[str, Callable[[], AdedDrafter | LookupDrafter]] = {
    "aded": lambda: AdedDrafter(AdedSettings(num_nodes=12, depth=5)),
    "lookup": lambda: LookupDrafter(LookupSettings(num_nodes=12, depth=5)),
}


@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return DRAFTERS[request.param]()


def test_greedy_tokens_equal_those_of_transformers(drafter: Drafter) -> None:
    model = tiny_llama(vocab=11)
    decoder = SpeculativeDecoder(model, drafter, tree="fixed")
    accepted = 0
    for prompt in PROMPTS:
        output = decoder.generate(prompt, max_new_tokens=24)
        assert output.sequences[0].tolist() == greedy_by_transformers(model, prompt, 24)
        accepted += output.stats.accepted.total()
    assert accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_sequences_have_the_target_distribution(name: str) -> None:
    model = tiny_llama(vocab=23, initializer_range=0.15)
    decoder = SpeculativeDecoder(model, DRAFTERS[name](), tree="fixed")
    stats = assert_follows_distribution(decoder, model, 1.0, samples=2 * SAMPLES)
    assert stats.accepted.total() > 20


@pytest.mark.parametrize("name", DRAFTERS)
def test_deterministic_trees_keep_the_target_distribution_exactly(name: str) -> None:
    drafter = DRAFTERS[name]()
    session = drafter.new_session(Sampling(LogitsProcessorList(), do_sample=True), capacity=64)
    tokens = [0, 1, 2, 0, 1, 3, 0, 1, 2, 3, 0, 1]
    session.advance(_committed(tokens))
    tree = session.propose(Budget(6, 2), StepRandom())
    proposed = [session.proposers[0].draft(np.array(tokens), 6, 2)]  # below every root
    assert tree.num_nodes >= 3
    assert tree.draft_probs is None
    assert set(tree.kind.flatten().tolist()) == {CandidateKind.DETERMINISTIC}

    def ours(other: DraftTree) -> DraftTree:
        return to_tree(proposed, other.base_length, 0)

    shape = TreeShape(autoregressive_levels=1, parallel_levels=0, children=2, breadth=1)
    assert two_step_error(Tables(4, 1, seed=3), shape, no_processors(), ours) < 1e-9


def test_no_budget_means_no_candidates(drafter: Drafter) -> None:
    session = drafter.new_session(Sampling(LogitsProcessorList(), do_sample=False), capacity=64)
    session.advance(_committed([1, 2, 3, 1, 2, 3, 1, 2]))
    assert session.propose(Budget(0), StepRandom()).num_nodes == 0
    assert session.propose(Budget(4, 0), StepRandom()).num_nodes == 0
    tree = session.propose(Budget(2, 1), StepRandom())
    assert 1 <= tree.num_nodes <= 2
    assert tree.depth.max() == 1


def test_a_session_takes_tokens_in_once_and_refuses_gaps(drafter: Drafter) -> None:
    session = drafter.new_session(Sampling(LogitsProcessorList(), do_sample=False), capacity=8)
    assert isinstance(session, DraftSession)
    tokens = [1, 2, 3, 1, 2, 3, 1]
    for _ in range(2):
        session.advance(_committed(tokens))
    assert session.lengths == (6,)
    with pytest.raises(ValueError, match="session ends at"):
        session.advance(commit_of((9,), (1,), torch.tensor([[1]]), torch.tensor([[1]]), None))
    session.rollback(2)
    assert session.lengths == (2,)
    more = torch.tensor([[3, 1, 2]])
    session.advance(commit_of((5,), (3,), more, torch.tensor([[3]]), None))
    assert session.propose(Budget(4), StepRandom()).token_ids[0, 0] == 1
    session.close()


def test_a_conversation_goes_on_where_it_was(drafter: Drafter) -> None:
    model = tiny_llama(vocab=11)
    decoder = SpeculativeDecoder(model, drafter, tree="fixed")
    assert_conversation_goes_on(decoder, model)


def test_learned_trigrams_are_kept_until_a_reset() -> None:
    model = tiny_llama(vocab=11)
    aded = DRAFTERS["aded"]()
    decoder = SpeculativeDecoder(model, aded, tree="fixed")
    taus = [decoder.generate([4, 5, 6, 7], max_new_tokens=15).stats.tau for _ in range(2)]
    assert taus[1] > taus[0]
    decoder.reset()
    assert decoder.generate([4, 5, 6, 7], max_new_tokens=15).stats.tau == taus[0]


def _committed(tokens: list[int]) -> Committed:
    count = len(tokens) - 1
    verified = torch.tensor([tokens[:count]])
    return commit_of((count,), (count,), verified, torch.tensor([tokens[count:]]), None)


@pytest.mark.parametrize("count", [1, 2, 12])
def test_every_trigram_of_a_request_is_learned_at_its_end(count: int) -> None:
    model = tiny_llama(vocab=11)
    aded = AdedDrafter()
    decoder = SpeculativeDecoder(model, aded, tree="fixed")
    prompts = [[4, 5, 6, 7], [1, 2, 3]]
    for output in decoder.generate_batch(prompts, max_new_tokens=count):
        ids = output.sequences[0].tolist()
        for first, second, third in zip(ids, ids[1:], ids[2:], strict=False):
            assert third in aded.table.row(first, second)


def test_threads_share_a_decoder(drafter: Drafter) -> None:
    model = tiny_llama(vocab=11)
    decoder = SpeculativeDecoder(model, drafter, tree="fixed")
    with ThreadPoolExecutor(3) as threads:
        outputs = list(threads.map(lambda ids: decoder.generate(ids, max_new_tokens=12), PROMPTS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.sequences[0].tolist() == greedy_by_transformers(model, prompt, 12)
