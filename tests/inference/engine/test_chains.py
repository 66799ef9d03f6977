"""Targets with recurrent layers verify chains: texts and distributions are those of the target."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.families import EVERY_RECURRENT_FAMILY, tiny_family
from helpers.losslessness import (
    assert_conversation_goes_on,
    assert_follows_distribution,
    greedy_by_transformers,
)
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.serving import MODEL, running
from helpers.tables import no_processors
from helpers.tokenizers import tiny_tokenizer
from transformers import PreTrainedModel

from inference import SpeculativeDecoder
from inference.autotune.costs import Costs
from inference.autotune.policy import AutoTree
from inference.autotune.setup import Pair
from inference.autotune.trees import StepCosts, TreeLearner, tree_arms
from inference.draft_tree import CandidateKind, DraftTree, SparseDistribution
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.base import TokenDrafter, Tokens
from inference.drafters.candidates import Candidates, to_tree
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.protocol import Budget
from inference.serving.engine_thread import EngineThread
from jakiro.target.adapter import TargetAdapter

PROMPTS = [[3, 4, 5], [1, 2, 3, 1, 2, 3, 1], [7] * 30]
COUNT = 32


class Oracle(TokenDrafter):
    """Drafter of known texts, whose candidates are right with a given probability each.

    Each candidate has a wrong sibling, which is sometimes better.
    """

    def __init__(self, texts: Sequence[list[int]], right: float, depth: int = 4) -> None:
        super().__init__("oracle", 2 * depth, depth)
        self._texts, self._right = texts, right
        self._random = np.random.default_rng(0)

    def draft(self, token_ids: Tokens, num_nodes: int, depth: int) -> Candidates:
        known, nodes, parent = token_ids.tolist(), [], -1
        rest = next((text[len(known) :] for text in self._texts if text[: len(known)] == known), [])
        for level, token in enumerate(rest[:depth], start=1):
            right = 0.9**level if self._random.random() < self._right else 0.6**level
            nodes.append((token, parent, level, right))
            nodes.append(((token + 1) % 11, parent, level, 0.7**level))
            parent = len(nodes) - 2
        return Candidates.of(nodes[:num_nodes])


def _texts(model: PreTrainedModel, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    return [greedy_by_transformers(model, prompt, COUNT) for prompt in prompts]


@pytest.mark.parametrize("family", EVERY_RECURRENT_FAMILY)
def test_greedy_texts_equal_those_of_generate_however_many_drafts_are_right(family: str) -> None:
    model = tiny_family(family, vocab_size=11)
    texts = _texts(model)
    taus = []
    for drafter in (None, *(Oracle(texts, right) for right in (0.0, 0.6, 1.0))):
        decoder = SpeculativeDecoder(model, drafter, tree="fixed")
        outputs = decoder.generate_batch(PROMPTS, max_new_tokens=COUNT, temperature=0)
        assert [output.sequences[0].tolist() for output in outputs] == texts
        alone = decoder.generate(PROMPTS[1], max_new_tokens=COUNT, temperature=0)
        assert alone.sequences[0].tolist() == texts[1]
        taus.append(alone.stats.tau)
    assert taus[:2] == [1, 1]
    assert 1.5 < taus[2] < 4 < taus[3]


class Walk(TokenDrafter):
    """Drafter of trees in which any token may follow."""

    def __init__(self) -> None:
        super().__init__("walk", 6, 3)

    def draft(self, token_ids: Tokens, num_nodes: int, depth: int) -> Candidates:
        first, second = int(token_ids[-1] + 1) % 7, int(3 * token_ids[-1] + 2) % 7
        nodes = [(first, -1, 1, 0.5), (second, -1, 1, 0.6), (first, 1, 2, 0.5), (6, 2, 3, 0.4)]
        return Candidates.of([node for node in nodes if node[2] <= depth][:num_nodes])


@pytest.mark.parametrize(
    ("family", "is_trained"),
    [
        ("lfm2", True),
        ("qwen3_next", False),
        *(
            pytest.param(family, is_trained, marks=pytest.mark.slow)
            for family, is_trained in [("qwen3_next", True), ("falcon_h1", True)]
        ),
    ],
)
def test_sampled_texts_follow_the_distribution(family: str, is_trained: bool) -> None:
    model = tiny_family(family, vocab_size=7)
    drafter = tiny_drafter(TargetAdapter(model)) if is_trained else Walk()
    decoder = SpeculativeDecoder(model, drafter, tree="fixed")
    stats = assert_follows_distribution(decoder, model, 1.0, samples=600, batch=300)
    assert stats.tau > 1.05


def _lookup(model: PreTrainedModel) -> Any:
    return LookupDrafter()


def _small(model: PreTrainedModel) -> Any:
    return SmallLMDrafter(tiny_llama(11), model)


def _small_and_aded(model: PreTrainedModel) -> Any:
    return CombinedDrafter(SmallLMDrafter(tiny_llama(11), model), AdedDrafter())


def _trained(model: PreTrainedModel) -> Any:
    return tiny_drafter(TargetAdapter(model), tiny_settings(source="hidden"))


def _pair(model: PreTrainedModel) -> Any:
    return Pair(_trained(model), lambda first: CombinedDrafter(first, LookupDrafter()))


@pytest.mark.parametrize(
    ("build", "tree"),
    [
        *((build, "auto") for build in (_lookup, _trained, _pair)),
        *((build, "fixed") for build in (_small, _small_and_aded, _trained, _pair)),
    ],
)
def test_all_kinds_of_drafters_propose_chains(
    build: Callable[[PreTrainedModel], Any], tree: Any
) -> None:
    model = tiny_family("qwen3_next", vocab_size=11)
    decoder = SpeculativeDecoder(model, build(model), tree=tree)
    texts = _texts(model)
    for _ in range(2):  # some drafters have learned from the first texts
        outputs = decoder.generate_batch(PROMPTS, max_new_tokens=COUNT, temperature=0)
        assert [output.sequences[0].tolist() for output in outputs] == texts


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_a_conversation_keeps_the_states_of_recurrent_layers(family: str) -> None:
    model = tiny_family(family, vocab_size=11)
    for drafter in (None, LookupDrafter()):
        assert_conversation_goes_on(SpeculativeDecoder(model, drafter, tree="fixed"), model)


def test_requests_that_join_a_lane_get_the_texts_of_generate() -> None:
    model = tiny_family("qwen3_next", vocab_size=11)
    texts = _texts(model)
    decoder = SpeculativeDecoder(model, Oracle(texts, 0.7), tree="fixed")
    with EngineThread(decoder, places=2, capacity=96) as engine:
        options = {"temperature": 0, "max_new_tokens": COUNT}
        jobs = [engine.submit(prompt, **options) for prompt in [*PROMPTS, *PROMPTS]]
        tokens = [[token for step in job for token in step.token_ids] for job in jobs]
    assert tokens == [text[-COUNT:] for text in texts] * 2


def test_a_server_decodes_with_a_recurrent_target() -> None:
    tokenizer = tiny_tokenizer(None)
    model = tiny_family("lfm2", vocab_size=len(tokenizer), max_position_embeddings=512)
    decoder = SpeculativeDecoder(model, LookupDrafter(), tokenizer, tree="fixed")
    alone = decoder.generate("a b a b", max_new_tokens=16, temperature=0)
    with running(decoder) as server, server.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt="a b a b", max_tokens=16, temperature=0
        )
    assert answer.choices[0].text == alone.text


def test_a_chain_takes_the_first_sampled_candidate_and_otherwise_the_best() -> None:
    """The second sequence has sampled candidates, and a deterministic one after them."""
    best = Candidates.of([(1, -1, 1, 0.4), (2, -1, 1, 0.5), (3, 1, 2, 0.3), (4, 1, 2, 0.2)])
    drawn = np.array([1, 0, -1, -1])
    sampled = Candidates.of([(5, -1, 1, 0.9), (6, -1, 1, 0.1), (7, -1, 1, 0.8), (8, 1, 2, 0.1)])
    probs = SparseDistribution(
        torch.arange(10).reshape(1, 5, 2).expand(2, -1, -1), torch.full((2, 5, 2), 0.5)
    )
    tree = to_tree([best, sampled._replace(drawn=drawn)], torch.tensor([9, 12]), probs)
    chain = tree.chain()
    assert chain.token_ids.tolist() == [[2, 3], [6, 8]]
    assert chain.parent.tolist() == [[-1, 0]] * 2
    assert chain.depth.tolist() == [[1, 2]] * 2
    assert chain.kind[1].tolist() == [CandidateKind.SAMPLED, CandidateKind.DETERMINISTIC]
    assert chain.draft_probs is not None
    assert chain.draft_probs.ids[0, :, 0].tolist() == [0, 4, 6]
    assert DraftTree.empty(torch.tensor([3])).chain().num_nodes == 0


def test_the_length_of_chains_follows_their_acceptance() -> None:
    costs = Costs(verify={0: 1.0, 8: 1.5}, draft={})
    trees = AutoTree(Budget(16, 8), costs, chains=True).trees
    assert isinstance(trees, Budget)
    arms = tree_arms(trees, no_processors(), costs, chains=True)
    assert [arm.num_nodes for arm in arms] == [1, 2, 3, 4, 6, 8]
    learner, steps = TreeLearner(arms), StepCosts(costs, arms)
    first, _ = learner.best(steps)
    chain = to_tree([Candidates.chain(np.arange(8))], torch.tensor([0])).chain().to_host()
    for _ in range(50):
        learner.learn(5, chain, [list(range(8))])
    assert learner.best(steps)[0].num_nodes == 8 > first.num_nodes
    for _ in range(1000):
        learner.learn(5, chain, [[]])
    assert learner.best(steps)[0].num_nodes == 1
