"""All drafters but trained ones alone keep the target's tokens and distribution in every call."""

from collections import Counter
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
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.quick import mostly_slow
from helpers.tables import Tables, no_processors, two_step_error
from helpers.variants import VARIANTS
from transformers import LlamaForCausalLM, LogitsProcessorList

from inference import SpeculativeDecoder
from inference.draft_tree import CandidateKind, DraftTree
from inference.drafters.aded.drafter import AdedDrafter, AdedSettings
from inference.drafters.candidates import to_tree
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.combined.knowledge import CombinedSettings
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.repeating import RepeatingDrafter, RepeatSettings
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.drafters.trained.drafter import TrainedDrafter
from inference.protocol import Budget, Committed, Drafter, DraftSession
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter

PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 6, 7, 8, 9, 10], [3], [9, 9, 1, 2, 3, 4, 9, 9, 1]]
UNTRAINED: dict[str, Callable[[], AdedDrafter | LookupDrafter]] = {
    "aded": lambda: AdedDrafter(AdedSettings(num_nodes=12, depth=5)),
    "lookup": lambda: LookupDrafter(LookupSettings(num_nodes=12, depth=5)),
}
TREE = TreeShape(autoregressive_levels=2, parallel_levels=1, children=2, breadth=2, sampled=True)
SIZES = CombinedSettings(num_nodes=14)
REPEATS = RepeatSettings(num_nodes=14, depth=6, before=0)


def _trained(model: LlamaForCausalLM, sampled: bool = True) -> TrainedDrafter:
    target, tree = TargetAdapter(model), TREE.model_copy(update={"sampled": sampled})
    return TrainedDrafter(tiny_drafter(target, tiny_settings()), target, tree)


def _block(model: LlamaForCausalLM) -> TrainedDrafter:
    target, tree = TargetAdapter(model), TREE.model_copy(update={"autoregressive_levels": 1})
    return TrainedDrafter(tiny_drafter(target, VARIANTS["block"]), target, tree)


def _small(model: LlamaForCausalLM) -> SmallLMDrafter:
    other = tiny_llama(vocab=model.config.vocab_size, num_hidden_layers=1)
    return SmallLMDrafter(other, model, SmallLMSettings(depth=3, children=2, breadth=2))


def _resting(drafter: CombinedDrafter) -> CombinedDrafter:
    """Let the first drafter rest in many steps: it takes as long as a step of the target."""
    drafter.use_costs(lambda _: 1.0, {1: 0.5, 2: 1.0})
    return drafter


DRAFTERS: dict[str, Callable[[LlamaForCausalLM], Drafter]] = {
    **{name: lambda _, make=make: make() for name, make in UNTRAINED.items()},
    "small": _small,
    "trained and aded": lambda model: CombinedDrafter(_trained(model), AdedDrafter(), SIZES),
    "small and lookup": lambda model: CombinedDrafter(_small(model), LookupDrafter(), SIZES),
    "repeated aded": lambda _: RepeatingDrafter(AdedDrafter(AdedSettings(num_nodes=8)), REPEATS),
    "repeated pair": lambda model: RepeatingDrafter(
        CombinedDrafter(_trained(model, sampled=False), LookupDrafter()), REPEATS
    ),
    "block and lookup": lambda model: CombinedDrafter(_block(model), LookupDrafter(), SIZES),
    "deterministic and aded": lambda model: CombinedDrafter(
        _trained(model, sampled=False), AdedDrafter(), SIZES
    ),
    "resting and lookup": lambda model: _resting(CombinedDrafter(_trained(model), LookupDrafter())),
}
QUICK = [*DRAFTERS][:-2]


@pytest.fixture(params=UNTRAINED)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return UNTRAINED[request.param]()


@pytest.mark.parametrize("name", mostly_slow(DRAFTERS, quick=QUICK))
def test_greedy_tokens_equal_those_of_transformers_alone_and_together(name: str) -> None:
    model = tiny_llama(vocab=11)
    drafter = DRAFTERS[name](model)
    decoder = SpeculativeDecoder(model, drafter, tree="fixed")
    expected = [greedy_by_transformers(model, prompt, 20) for prompt in PROMPTS]
    accepted = Counter[int]()
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        output = decoder.generate(prompt, max_new_tokens=20)
        assert output.sequences[0].tolist() == tokens
        accepted += output.stats.accepted_by_proposer
    assert accepted.total() > 0
    if isinstance(drafter, CombinedDrafter):
        assert accepted[drafter.second_id] > 0
    together = decoder.generate_batch(PROMPTS, max_new_tokens=20)
    assert [output.sequences[0].tolist() for output in together] == expected
    assert_conversation_goes_on(decoder, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_sequences_have_the_target_distribution(name: str) -> None:
    model = tiny_llama(vocab=23, initializer_range=0.15)
    decoder = SpeculativeDecoder(model, DRAFTERS[name](model), tree="fixed")
    accepted = assert_follows_distribution(decoder, model, 1.0, samples=2 * SAMPLES)
    assert accepted.accepted_by_proposer.total() > 20


@pytest.mark.parametrize("name", UNTRAINED)
def test_deterministic_trees_keep_the_target_distribution_exactly(name: str) -> None:
    drafter = UNTRAINED[name]()
    session = drafter.new_session(Sampling(LogitsProcessorList(), do_sample=True), capacity=64)
    tokens = [0, 1, 2, 0, 1, 3, 0, 1, 2, 3, 0, 1]
    session.advance(_committed(tokens))
    tree = session.propose(Budget(6, 2), StepRandom())
    proposed = [session.proposers[0].draft(np.array(tokens), 6, 2)]  # below every root
    assert tree.num_nodes >= 3
    assert tree.draft_probs is None
    assert set(tree.kind.flatten().tolist()) == {CandidateKind.DETERMINISTIC}

    def ours(other: DraftTree) -> DraftTree:
        return to_tree(proposed, other.base_length)

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


def test_learned_trigrams_are_kept_until_a_reset() -> None:
    model = tiny_llama(vocab=11)
    aded = UNTRAINED["aded"]()
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
