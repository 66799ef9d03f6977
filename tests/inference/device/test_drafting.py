"""Trees of one text, drafted from its tokens alone."""

from typing import Any

import pytest
from helpers.models import tiny_llama
from helpers.remote import opening
from helpers.trigrams import known_trigrams

from inference.device import drafting
from inference.device.drafting import DeviceDrafting
from inference.draft_tree import SequenceTree
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.repeating import RepeatingDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.protocol import Drafter
from inference.remote.messages import OpenSession, TreeLimits
from inference.remote.tree_frame import encode_step
from jakiro.errors import ConfigError

TEXT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 9, 1, 2]


def _drafting(drafter: Drafter | None, do_sample: bool = True, **limits: int) -> DeviceDrafting:
    request = OpenSession(prompt=[1], seed=5, max_tokens=40)
    changes = {"samples": do_sample, "limits": TreeLimits(**limits)}
    return DeviceDrafting(drafter, request, opening().model_copy(update=changes))


def _lm() -> SmallLMDrafter:
    model = tiny_llama(vocab=11)
    return SmallLMDrafter(model, model)


def _tokens(tree: SequenceTree) -> list[int]:
    return [tree.token_ids[node] for own in tree.children.values() for node in own]


@pytest.mark.parametrize("make", [LookupDrafter, AdedDrafter, _lm, lambda: None])
def test_trees_do_not_depend_on_how_the_tokens_arrived(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, step_by_step = _drafting(make()), _drafting(make())
    monkeypatch.setattr(drafting, "_CHUNK", 3)
    for length in (2, 5, 6, len(TEXT)):
        tree = step_by_step.tree(TEXT[:length], 7)
    expected = at_once.tree(TEXT, 7)
    if not isinstance(make(), AdedDrafter):  # which learns at every step
        assert (tree.token_ids, tree.parent) == (expected.token_ids, expected.parent)
    encode_step(len(TEXT) - 1, TEXT[-1], tree)  # raises an error unless all weights are integers


def test_trees_keep_to_the_limits_of_the_server() -> None:
    tree = _drafting(LookupDrafter(), max_nodes=3, max_depth=2).tree(TEXT, 1)
    assert 0 < len(_tokens(tree)) <= 3
    assert max(tree.depth) <= 2


def test_trees_of_a_step_are_the_same_again_and_those_of_another_step_differ() -> None:
    trees = [_tokens(_drafting(_lm()).tree(TEXT, step)) for step in (1, 1, 2, 3)]
    assert trees[0] == trees[1]
    assert trees[2:] != [trees[0], trees[0]]


def test_greedy_trees_are_not_sampled() -> None:
    assert not _drafting(_lm(), do_sample=False).tree(TEXT, 1).sampled


def test_a_drafter_reads_the_end_of_a_text() -> None:
    drafter = AdedDrafter()
    own = _drafting(drafter)
    own.tree(TEXT[:4], 1)
    before = len(known_trigrams(drafter.table))
    own.close(TEXT)
    own.close(TEXT)
    assert len(known_trigrams(drafter.table)) > before


def test_a_wrapped_drafter_drafts_and_reads_the_end_of_a_text() -> None:
    drafter = AdedDrafter()
    own = _drafting(RepeatingDrafter(drafter))
    own.tree(TEXT[:4], 1)
    before = len(known_trigrams(drafter.table))
    own.close(TEXT)
    assert len(known_trigrams(drafter.table)) > before


def test_a_drafter_that_learns_from_distributions_is_refused() -> None:
    with pytest.raises(ConfigError, match="learns from the target's distributions"):
        _drafting(CombinedDrafter(_lm(), LookupDrafter()))
