"""Two drafters that share trees keep the target's tokens and distribution."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from helpers.drafting import commit_of
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.tables import Tables, no_processors, two_step_error
from transformers import LlamaForCausalLM, LogitsProcessorList

from inference import SpeculativeDecoder
from inference.autotune.setup import Pair
from inference.draft_tree import ROOT, CandidateKind, DraftTree
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.candidates import Candidates
from inference.drafters.combined.drafter import CombinedDrafter, CombinedSession, mixed_tree
from inference.drafters.combined.knowledge import CandidatePool, CombinedSettings
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.drafters.trained.drafter import TrainedDrafter
from inference.protocol import AdaptiveDrafter, Budget, DraftSession
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter
from jakiro.target.step import chain_step

GREEDY = Sampling(LogitsProcessorList(), do_sample=False)
SAMPLED = Sampling(LogitsProcessorList(), do_sample=True)
PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 6, 7, 8, 9, 10], [3], [9, 9, 1, 2, 3, 4, 9, 9, 1]]
SIZES = CombinedSettings(num_nodes=14)
TREE = TreeShape(autoregressive_levels=2, parallel_levels=1, children=2, breadth=2, sampled=True)


def _trained(model: LlamaForCausalLM, tree: TreeShape = TREE) -> TrainedDrafter:
    target = TargetAdapter(model)
    return TrainedDrafter(tiny_drafter(target, tiny_settings()), target, tree)


def _small(model: LlamaForCausalLM) -> SmallLMDrafter:
    other = tiny_llama(vocab=model.config.vocab_size, num_hidden_layers=1)
    return SmallLMDrafter(other, model, SmallLMSettings(depth=2, children=2, breadth=2))


DRAFTERS: dict[str, Callable[[LlamaForCausalLM], CombinedDrafter]] = {
    "trained and aded": lambda model: CombinedDrafter(_trained(model), AdedDrafter(), SIZES),
    "small and lookup": lambda model: CombinedDrafter(_small(model), LookupDrafter(), SIZES),
    "resting and lookup": lambda model: _resting(CombinedDrafter(_trained(model), LookupDrafter())),
}


def _resting(drafter: CombinedDrafter) -> CombinedDrafter:
    """Let the first drafter rest in many steps: it takes as long as a step of the target."""
    drafter.use_costs(lambda _: 1.0, {1: 0.5, 2: 1.0})
    return drafter


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    """Run each test in inference mode, as an engine runs its sessions."""
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    ("children", "length"), [(1, 3), (2, 2), pytest.param(2, 3, marks=pytest.mark.slow)]
)
def test_guesses_beside_sampled_candidates_keep_the_target_distribution(
    children: int, length: int
) -> None:
    shape = TreeShape(
        autoregressive_levels=1,
        parallel_levels=1,
        children=children,
        breadth=1,
        sampled=True,
    )
    guess = Candidates(
        np.array([1, 2, 3, 0]), np.array([-1, 0, -1, 2]), np.array([1, 2, 1, 2]), np.full(4, 0.5)
    )

    def mixed(tree: DraftTree) -> DraftTree:
        pool = CandidatePool(tree.sequence_tree(), tree.score[0].tolist())
        pool.graft(ROOT, guess, depth=3)
        pool.graft(0, guess, depth=3)  # guesses may depend on sampled candidates
        values = np.ones(len(pool.token_ids))
        kept = pool.kept(values, np.arange(len(values)), second_id=7, is_sampled=True)
        tree = mixed_tree([kept], tree)
        assert set(tree.kind.flatten().tolist()) == set(CandidateKind)
        return tree

    tables = Tables(4, 1, seed=3)
    assert two_step_error(tables, shape, no_processors(), mixed, length) < 1e-9


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("trained and aded", SAMPLED), ("small and lookup", GREEDY), ("resting and lookup", SAMPLED)],
)
def test_trees_keep_to_the_budget_and_siblings_differ(name: str, sampling: Sampling) -> None:
    model = tiny_llama(vocab=11)
    drafter = DRAFTERS[name](model)
    session = _session(drafter, sampling, [1, 2, 3, 1, 2, 3, 1, 2])
    for budget in (Budget(0), Budget(9, 0)):
        assert session.propose(budget, StepRandom([(5,)])).num_nodes == 0
    for budget in (Budget(1), Budget(5, 2), Budget(99)):
        tree = session.propose(budget, StepRandom([(5,)]))
        assert 1 <= tree.num_nodes <= min(budget.num_nodes, drafter.max_nodes)
        assert tree.max_depth <= min(budget.depth or 99, drafter.max_depth)
        own = tree.sequence_tree()
        for parent, siblings in own.children.items():
            assert parent < min(siblings)
            assert len({own.token_ids[node] for node in siblings}) == len(siblings)
            assert tree.max_siblings >= len(siblings)
    if tree.draft_probs is not None:
        assert tree.draft_probs.ids.shape[1] == tree.num_nodes + 1


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_model_that_takes_no_time_drafts_in_trees_of_every_size(sampling: Sampling) -> None:
    shape = TREE if sampling.do_sample else TREE.model_copy(update={"sampled": False})
    drafter = CombinedDrafter(_trained(tiny_llama(vocab=11), shape), LookupDrafter(), SIZES)
    drafter.use_costs(lambda _: 1.0, {1: 0.0, 2: 0.0})
    session = _session(drafter, sampling, [1, 2, 3])  # the text has no guess
    for num_nodes in range(1, SIZES.num_nodes + 1):
        assert session.propose(Budget(num_nodes), StepRandom([(5,)])).num_nodes > 0


def test_guesses_go_on_below_the_candidates_of_the_first_drafter() -> None:
    model = tiny_llama(vocab=11)
    tokens = [*range(11), *range(11), 0, 1]  # every token of the vocabulary has occurred before
    settings = CombinedSettings(num_nodes=60, grafts=9, graft_nodes=2)
    drafter = CombinedDrafter(_trained(model), LookupDrafter(), settings)
    own = _session(drafter, SAMPLED, tokens).propose(Budget(60), StepRandom([(6,)])).sequence_tree()
    first = {node for siblings in own.sampled.values() for node in siblings}
    below = [parent for parent in own.deterministic if parent in first]
    assert below
    for parent in below:
        expected = (own.token_ids[parent] + 1) % 11
        assert expected in {own.token_ids[node] for node in own.children[parent]}


def test_the_model_reads_tokens_that_only_the_text_proposed() -> None:
    model = tiny_llama(vocab=11)
    drafter = CombinedDrafter(_small(model), LookupDrafter(), SIZES)
    tokens = [1, 2, 3, 1, 2, 3, 1]
    session = _session(drafter, GREEDY, tokens)
    for _ in range(3):
        own = session.propose(Budget(14), StepRandom()).sequence_tree()
        second = [n for n, proposer in enumerate(own.proposer_id) if proposer == drafter.second_id]
        path = [own.token_ids[node] for node in own.path(max(second, key=own.depth.__getitem__))]
        count = len(path) + 1
        tokens += [*path, 7]
        verified = torch.tensor([tokens[-1 - count : -1]])
        end = len(tokens) - 1
        session.advance(commit_of((end,), (count,), verified, torch.tensor([[7]]), None))
        fresh = _session(drafter, GREEDY, tokens)
        for one, other in ((session.first, fresh.first), (session, fresh)):
            got, expected = (each.propose(Budget(14), StepRandom()) for each in (one, other))
            assert got.token_ids.tolist() == expected.token_ids.tolist()
            torch.testing.assert_close(got.score, expected.score, atol=1e-5, rtol=1e-5)


def test_automatic_trees_of_two_drafters_change_no_token() -> None:
    model, prompt = tiny_llama(vocab=11), [1, 2, 3, 4] * 4
    expected = SpeculativeDecoder(model).generate(prompt, max_new_tokens=40, temperature=0)
    combine = partial(CombinedDrafter, second=LookupDrafter())
    pair = Pair(tiny_drafter(TargetAdapter(model)), combine)
    automatic = SpeculativeDecoder(model, pair, tree="auto")
    for _ in range(2):
        output = automatic.generate(prompt, max_new_tokens=40, temperature=0)
        assert output.new_token_ids == expected.new_token_ids
    drafter = automatic.drafter
    shape = drafter.new_session(GREEDY, capacity=64).shape
    learned = drafter.cascade(False, shape)
    automatic.reset(trees=False)
    assert drafter.cascade(False, shape) is learned is not None
    automatic.reset()
    assert drafter.cascade(False, shape) is not learned


@pytest.mark.parametrize("second_alone", [False, True])
def test_an_open_session_forgets_with_its_drafters(second_alone: bool) -> None:
    first = _trained(tiny_llama(vocab=11), TreeShape(children=2, breadth=2))
    drafter = CombinedDrafter(first, AdedDrafter())
    session = _session(drafter, GREEDY, [1, 2, 3, 1, 2])
    learned = session.knowledge
    session.propose(Budget(14), StepRandom())
    assert session.knowledge is learned
    adaptive = drafter.second if second_alone else drafter
    assert isinstance(adaptive, AdaptiveDrafter)
    adaptive.reset()
    session.propose(Budget(14), StepRandom())
    assert session.knowledge is not learned


def _session(drafter: CombinedDrafter, sampling: Sampling, tokens: list[int]) -> CombinedSession:
    session = drafter.new_session(sampling, capacity=64)
    assert isinstance(session, DraftSession)
    end = len(tokens) - 1
    verified, root = torch.tensor([tokens[:end]]), torch.tensor([tokens[end:]])
    memory = None
    if isinstance(drafter.first, TrainedDrafter):
        target = drafter.first.target
        step = chain_step(verified, 0)
        memory = drafter.encode_memory(target.forward(step, target.new_cache(1, 64)))
    session.advance(commit_of((end,), (end,), verified, root, memory))
    return session
