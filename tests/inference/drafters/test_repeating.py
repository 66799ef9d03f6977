"""Trees with repetitions: they are longer, bounded, and verified as deterministic trees."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from hypothesis import given
from hypothesis import strategies as st

from inference import SpeculativeDecoder
from inference.draft_tree import ROOT
from inference.drafters.candidates import Candidates
from inference.drafters.repeating import RepeatingDrafter, RepeatSettings, with_repeats
from inference.drafters.trained.drafter import TrainedDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    """Run each test in inference mode, as an engine runs its sessions."""
    with torch.inference_mode():
        yield


#  root - 1 - 2 - 3      Token 3 follows the path 1, 2. With before=0, 3 is appended to the 2 below
#       \ 4 - 2          4 as well; with before=1 it is not, because 4, 2 differs from 1, 2.
def _tree() -> Candidates:
    tokens, parents = np.array([1, 4, 2, 2, 3]), np.array([-1, -1, 0, 1, 2])
    return Candidates(
        tokens, parents, np.array([1, 1, 2, 2, 3]), np.array([0.6, 0.4, 0.5, 0.3, 0.4])
    )


def test_leaves_go_on_as_the_same_tokens_do_elsewhere() -> None:
    repeated = with_repeats(_tree(), RepeatSettings(before=0), 16, 8)
    assert _paths(repeated) == {(1,), (1, 2), (1, 2, 3), (4,), (4, 2), (4, 2, 3)}
    assert repeated.origin.tolist().count(4) == 2
    scores = dict(zip(_in_order(repeated), repeated.scores, strict=True))
    assert scores[4, 2, 3] == pytest.approx(0.3 * 0.4 / 0.5)
    more = with_repeats(_tree(), RepeatSettings(before=1), 16, 8)
    assert _paths(more) == {(1,), (1, 2), (1, 2, 3), (4,), (4, 2)}


@given(
    parents=st.lists(st.integers(-1, 12), min_size=1, max_size=13),
    tokens=st.lists(st.integers(0, 2), min_size=13, max_size=13),
    limit=st.integers(1, 30),
    depth=st.integers(1, 9),
    before=st.integers(0, 2),
)
def test_trees_stay_within_their_bounds_and_siblings_differ(
    parents: list[int], tokens: list[int], limit: int, depth: int, before: int
) -> None:
    tree = _well_formed(parents, tokens)
    settings = RepeatSettings(num_nodes=20, depth=7, before=before, prune=0.0)
    found = with_repeats(tree, settings, limit, depth)
    assert len(found.token_ids) <= min(limit, 20)
    pairs = list(zip(found.parents.tolist(), found.token_ids.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    for node, parent in enumerate(found.parents.tolist()):
        assert -1 <= parent < node
        assert found.depths[node] == (1 if parent < 0 else found.depths[parent] + 1)
        assert found.depths[node] <= min(depth, 7)
        assert 0 < found.scores[node] <= (1 if parent < 0 else found.scores[parent])
    if limit >= len(tree.token_ids) and depth >= tree.depths.max() <= 7:
        best = with_repeats(tree, settings.model_copy(update={"num_nodes": 500}), 500, depth)
        assert _paths(tree) <= _paths(best) or len(best.origin) == 500


def test_sampled_trees_are_refused() -> None:
    model = tiny_llama(vocab=11)
    trained = TrainedDrafter.for_target(tiny_drafter(TargetAdapter(model)), TargetAdapter(model))
    decoder = SpeculativeDecoder(model, RepeatingDrafter(trained), tree="fixed")
    with pytest.raises(ConfigError, match="cannot be added to trees of sampled candidates"):
        decoder.generate([1, 2], temperature=1.0, max_new_tokens=4)


def _in_order(tree: Candidates) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(() if parent == ROOT else paths[parent]), token))
    return paths


def _paths(tree: Candidates) -> set[tuple[int, ...]]:
    return set(_in_order(tree))


def _well_formed(parents: list[int], tokens: list[int]) -> Candidates:
    """Return a tree without equal siblings."""
    node_of: dict[tuple[int, int], int] = {}
    depths: list[int] = []
    scores: list[float] = []
    for wanted, token in zip(parents, tokens, strict=False):
        parent = min(wanted, len(depths) - 1)
        if (parent, token) in node_of:
            continue
        node_of[parent, token] = len(depths)
        depths.append(1 if parent < 0 else depths[parent] + 1)
        scores.append(0.3 if parent < 0 else 0.3 * scores[parent])
    above, ids = np.array(list(node_of), np.int64).T
    return Candidates(ids, above, np.array(depths), np.array(scores))
