"""The law of texts with a grammar: that of the target, with each node's distribution masked."""

import re
import sys
from collections import Counter

import pytest
import torch
from helpers.chi_square import Probabilities, p_value
from helpers.models import tiny_drafter, tiny_llama
from helpers.tables import Tables, one_step, two_step_error
from helpers.tokenizers import SlowTokenizer, letter_tokenizer, tiny_tokenizer
from transformers import LlamaForCausalLM, LogitsProcessorList, TopPLogitsWarper

from inference import SpeculativeDecoder
from inference.draft_tree import DraftTree
from inference.drafters.candidates import Candidates, to_tree
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.context import _without_forbidden
from inference.protocol import Drafter
from inference.sampling.batch import BatchSampling
from inference.sampling.grammar import GrammarProcessor
from inference.sampling.options import Sampling
from inference.trees.builder import TreeBuilder
from inference.trees.shape import TreeShape
from jakiro.errors import PromptError
from jakiro.target.adapter import TargetAdapter

GRAMMAR = re.compile("a(b|c){0,2}|ca?b")
VOCAB, END = 7, 4  # two tokens more than the tokenizer has
SHAPE = TreeShape(children=2, breadth=2, num_nodes=6)


def _sampling(*others: TopPLogitsWarper, do_sample: bool = True) -> Sampling:
    grammar = GrammarProcessor.compile(GRAMMAR, letter_tokenizer()).for_sequence(2, [END])
    return Sampling(LogitsProcessorList([grammar, *others]), do_sample)


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("top_p", [None, 0.8])
def test_two_steps_have_the_masked_law_of_the_target(sampled: bool, top_p: float | None) -> None:
    tables = Tables(VOCAB, components=2, seed=4)
    sampling = _sampling(*([] if top_p is None else [TopPLogitsWarper(top_p)]))
    shape = SHAPE.model_copy(update={"sampled": sampled, "breadth": 1 if sampled else 2})
    assert two_step_error(tables, shape, sampling) < 1e-9


def test_trees_have_no_forbidden_candidates() -> None:
    sampling = _sampling()
    grammar = sampling.grammar
    assert grammar is not None

    def check(tree: DraftTree) -> DraftTree:
        host = tree.sequence_tree()
        nodes = [node for siblings in host.children.values() for node in siblings]
        assert all(
            grammar.allows([host.token_ids[above] for above in host.path(node)]) for node in nodes
        )
        sizes.add(len(nodes))
        return tree

    sizes: set[int] = set()
    shape = SHAPE.model_copy(update={"sampled": True, "breadth": 1})
    one_step(Tables(VOCAB, components=2, seed=4), shape, sampling, (0, 1), tamper=check)
    assert len(sizes) > 1  # after a complete text, there are no children


def test_candidates_are_ranked_by_the_renormalized_distribution() -> None:
    sampling = _sampling(do_sample=False)
    grammar = sampling.grammar
    assert grammar is not None
    grammar.set_root([0, 1])
    shape = TreeShape(children=VOCAB, breadth=2, num_nodes=2 * VOCAB)
    builder = TreeBuilder(shape, BatchSampling([sampling]), grammars=[grammar])
    tree = builder.build(Tables(VOCAB, 2, seed=4).source((0, 1)), torch.tensor([1]))
    first = tree.score[(tree.depth == 1) & tree.is_valid]
    assert 1 < len(first) < VOCAB
    assert first.exp().sum() == pytest.approx(1.0)


def test_nothing_is_verified_below_a_forbidden_node() -> None:
    grammar = _sampling().grammar
    assert grammar is not None
    grammar.set_root([0, 1])
    nodes = [(0, -1, 1, 1.0), (1, -1, 1, 0.9), (1, 0, 2, 0.8), (0, 1, 2, 0.7), (0, 2, 3, 0.6)]
    nodes += [(END, 2, 3, 0.5), (0, 5, 4, 0.4)]
    tree = to_tree([Candidates.of(nodes)] * 2, torch.tensor([1, 1]))
    found = _without_forbidden(tree, [grammar, None])
    assert found.is_valid.tolist() == [[True, False, True, False, False, True, False], [True] * 7]


def _masked_law(model: LlamaForCausalLM, prompt: list[int]) -> Probabilities:
    """Return the probability of each text, from the model's logits and the grammar."""
    grammar = GrammarProcessor.compile(GRAMMAR, letter_tokenizer()).for_sequence(0, [END])
    probs: Probabilities = {}
    waiting = {(): 1.0}
    while waiting:
        text, share = waiting.popitem()
        logits = model(torch.tensor([[*prompt, *text]])).logits[0, -1:]
        scores = grammar(torch.tensor([[*text]], dtype=torch.long), logits).double()
        for token, part in enumerate(scores.softmax(-1)[0].tolist()):
            if part > 0:
                longer = (*text, token)
                into = probs if grammar.is_complete(longer) else waiting
                into[longer] = share * part
    return probs


def _drafters(model: LlamaForCausalLM) -> dict[str, Drafter]:
    small = SmallLMDrafter(tiny_llama(VOCAB, seed=3, num_hidden_layers=1), model)
    target = TargetAdapter(model)
    trained = TrainedDrafter.for_target(tiny_drafter(target), target)
    pair = CombinedDrafter(small, LookupDrafter())
    return {"trained": trained, "small": small, "pair": pair}


@pytest.mark.parametrize("name", ["trained", "small", "pair"])
@torch.no_grad()
def test_sampled_texts_follow_the_masked_law(name: str) -> None:
    model = tiny_llama(VOCAB, eos_token_id=END)
    drafter = _drafters(model)[name]
    decoder = SpeculativeDecoder(model, drafter, letter_tokenizer(), tree="fixed")
    prompt, law = [0, 1, 0, 3, 0], _masked_law(model, [0, 1, 0, 3, 0])
    outputs = decoder.generate_batch(
        [prompt] * 300, grammar=GRAMMAR, temperature=1.0, seed=1, max_new_tokens=8
    )
    counts = Counter(tuple(output.new_token_ids) for output in outputs)
    assert set(counts) <= set(law)
    assert p_value(counts, law) > 0.0005
    assert sum(output.stats.accepted.total() for output in outputs) > 0


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ({"type": "foo"}, "Invalid type"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        (re.compile("a(?=b)"), "look-around"),
        (re.compile(r"\d", re.ASCII), "unrecognized flag"),
        ("start: missing", "unknown name"),
    ],
)
def test_what_cannot_be_a_grammar_is_refused_with_the_reason(source: object, reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        GrammarProcessor.compile(source, tiny_tokenizer())


def test_a_tokenizer_in_python_has_no_grammars() -> None:
    with pytest.raises(PromptError, match="fast tokenizer"):
        GrammarProcessor.compile({}, SlowTokenizer())


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(PromptError, match=r"llguidance is not installed.*`grammar`"):
        GrammarProcessor.compile({}, tiny_tokenizer())
