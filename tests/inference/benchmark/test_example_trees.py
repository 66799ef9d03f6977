"""The example tree of a report is one that was verified, with the text before and after it."""

from string import ascii_letters, digits
from typing import Any

import pytest
from helpers.models import tiny_drafter, tiny_llama
from helpers.tokenizers import SlowTokenizer
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.benchmark import example_trees
from inference.benchmark.example_trees import CONTEXT_TOKENS, example_tree
from inference.benchmark.methods import OwnDecoding, SamplingOptions
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.protocol import Drafter
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter

GREEDY = SamplingOptions(temperature=0.0, max_new_tokens=21)


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=61)


@pytest.fixture
def tokenizer() -> SlowTokenizer:
    """A tokenizer with one character for each of the target's tokens."""
    tokenizer = SlowTokenizer()
    tokenizer((ascii_letters + digits)[:60])
    return tokenizer


def _method(model: LlamaForCausalLM, drafter: Drafter | JakiroDrafter | None) -> OwnDecoding:
    return OwnDecoding("mine", "drafter", SpeculativeDecoder(model, drafter, tree="fixed"))


def _always_right(model: LlamaForCausalLM) -> SmallLMDrafter:
    settings = SmallLMSettings(depth=3, children=2, breadth=4)
    return SmallLMDrafter(tiny_llama(vocab=61), model, settings)


def test_the_tree_stands_between_the_text_before_it_and_the_next_token(
    model: LlamaForCausalLM, tokenizer: SlowTokenizer
) -> None:
    prompt = [1, 2, 3]
    tree = example_tree(_method(model, _always_right(model)), prompt, GREEDY, 0, tokenizer)
    assert tree is not None
    assert (tree.method, tree.temperature) == ("mine", 0.0)
    path = [node.token for node in tree.nodes if node.accepted]
    assert len(path) == 3
    output = SpeculativeDecoder(model).generate(prompt, max_new_tokens=21)
    text = tokenizer.decode(output.sequences[0].tolist())
    assert text.startswith("".join((tree.context, tree.root, *path, tree.next_token)))


def test_a_tree_with_accepted_nodes_is_shown_even_if_most_trees_have_none(
    model: LlamaForCausalLM, tokenizer: SlowTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = example_trees._decoded

    def mostly_rejected(*arguments: Any) -> Any:
        token_ids, steps = decoded(*arguments)
        return token_ids, [steps[0]._replace(path=[])] * 20 + steps

    monkeypatch.setattr(example_trees, "_decoded", mostly_rejected)
    tree = example_tree(_method(model, _always_right(model)), [1, 2], GREEDY, 0, tokenizer)
    assert tree is not None
    assert any(node.accepted for node in tree.nodes)


def test_nodes_come_after_their_parents_and_have_the_expert_that_proposed_them(
    model: LlamaForCausalLM, tokenizer: SlowTokenizer
) -> None:
    sampling = GREEDY._replace(temperature=1.0)
    method = _method(model, tiny_drafter(TargetAdapter(model)))
    tree = example_tree(method, [1, 2, 3], sampling, 0, tokenizer)
    assert tree is not None
    for index, node in enumerate(tree.nodes):
        assert node.parent < index
        assert node.depth == 1 + (tree.nodes[node.parent].depth if node.parent >= 0 else 0)
        assert node.expert in (0, 1)


def test_only_the_end_of_a_long_text_is_shown(
    model: LlamaForCausalLM, tokenizer: SlowTokenizer
) -> None:
    prompt = [1 + number % 60 for number in range(90)]
    tree = example_tree(_method(model, _always_right(model)), prompt, GREEDY, 0, tokenizer)
    assert tree is not None
    assert len(tree.context) == CONTEXT_TOKENS
    output = SpeculativeDecoder(model).generate(prompt, max_new_tokens=21)
    text = tokenizer.decode(output.sequences[0].tolist())
    assert text.index(tree.context + tree.root) > len(prompt) - CONTEXT_TOKENS - 1


def test_decoding_without_drafts_has_no_tree(
    model: LlamaForCausalLM, tokenizer: SlowTokenizer
) -> None:
    assert example_tree(_method(model, None), [1, 2, 3], GREEDY, 0, tokenizer) is None
