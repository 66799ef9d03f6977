"""Drafters by their names, and trees of one text, drafted from its tokens alone."""

from pathlib import Path
from typing import Any

import pytest
from helpers.models import tiny_llama
from helpers.remote import opening
from helpers.serving import Running
from helpers.tokenizers import tiny_tokenizer
from helpers.trigrams import known_trigrams

from inference import SpeculativeDecoder
from inference.device import RemoteDecoder, drafting
from inference.device.drafting import DeviceDrafting, device_drafter
from inference.draft_tree import SequenceTree
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.repeating import RepeatingDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.protocol import Drafter
from inference.remote.messages import OpenSession, TreeLimits, VerifierInfo
from inference.remote.tree_frame import encode_step
from jakiro.errors import ConfigError, TargetMismatch
from jakiro.target.record import tokenizer_fingerprint

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


def _info(**fields: Any) -> VerifierInfo:
    known = {
        "model": "tiny",
        "fingerprint": "a",
        "tokenizer": "c",
        "has_template": False,
        "vocab_size": 61,
    }
    return VerifierInfo(**{**known, **fields})


def test_drafters_without_a_model_have_names() -> None:
    assert isinstance(device_drafter("lookup", _info()), LookupDrafter)
    assert isinstance(device_drafter("aded", _info()), AdedDrafter)
    assert device_drafter("none", _info()) is None


@pytest.mark.parametrize("name", ["aded=table", "some/drafter", "lookup+lm=x"])
def test_other_drafters_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="lookup, aded, lm=MODEL, none, or a folder"):
        device_drafter(name, _info())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("small")
    tokenizer = tiny_tokenizer(None)
    tokenizer.save_pretrained(found)
    tiny_llama(vocab=len(tokenizer) + 3, seed=2).save_pretrained(found)
    return found


def test_a_small_model_drafts_tokens_of_the_target_only(
    folder: Path, server: Running, decoder: SpeculativeDecoder
) -> None:
    with RemoteDecoder(server.url, f"lm={folder}", dtype="float32") as remote:
        output = remote.generate([5, 6, 7], temperature=1, seed=2, max_new_tokens=12)
    assert output.stats.proposed_by_proposer.total() > 12
    size = decoder.target.spec.vocab_size
    drafter: Any = remote.drafter
    assert drafter.vocab_size == size


def test_a_small_model_with_another_tokenizer_is_refused(folder: Path) -> None:
    own = tokenizer_fingerprint(tiny_tokenizer(None))
    with pytest.raises(TargetMismatch, match="does not have the tokenizer of the server's target"):
        device_drafter(f"lm={folder}", _info(tokenizer=own[::-1]))
