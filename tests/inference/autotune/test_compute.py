"""The number of threads and the form of the weights are chosen by measured times."""

import pytest
import torch
from helpers.models import tiny_llama

from inference import SpeculativeDecoder
from inference.autotune.compute import (
    Compute,
    ComputeGrid,
    ComputeSeconds,
    measure_grid,
)
from inference.autotune.costs import NODE_COUNTS, measure_costs
from inference.drafters.lookup import LookupDrafter
from jakiro.errors import TargetNotSupported
from jakiro.target.adapter import TargetAdapter

OWN, TREES, ALL = (
    Compute(threads=1),
    Compute(threads=1, packed=True),
    Compute(threads=2, packed=True, pack_single=True),
)
GRID = ComputeGrid(
    ways=(
        ComputeSeconds(compute=OWN, token=1.0, tree=4.0),
        ComputeSeconds(compute=TREES, token=1.1, tree=1.2),
        ComputeSeconds(compute=ALL, token=1.15, tree=1.1),
    )
)


def test_trees_count_only_with_a_drafter() -> None:
    assert GRID.best(drafts=True) == ALL
    assert GRID.best(drafts=False) == OWN


def test_reordered_weights_must_be_clearly_faster_than_the_targets_own() -> None:
    own = ComputeSeconds(compute=OWN, token=1.0, tree=1.0)
    for token, best in ((0.97, OWN), (0.9, ALL)):
        reordered = ComputeSeconds(compute=ALL, token=token, tree=token)
        for drafts in (True, False):
            assert ComputeGrid(ways=(own, reordered)).best(drafts=drafts) == best


def test_only_clearly_slower_ways_cannot_be_the_fastest_elsewhere() -> None:
    slow = ComputeSeconds(compute=OWN, token=2.0, tree=2.0)
    fast = ComputeSeconds(compute=TREES, token=1.0, tree=2.5)
    near = ComputeSeconds(compute=ALL, token=1.2, tree=2.0)
    grid = ComputeGrid(ways=(slow, fast, near))
    assert grid.contenders(drafts=False) == [TREES, ALL]
    assert grid.contenders(drafts=True) == [OWN, TREES, ALL]


def test_every_way_is_measured_and_the_target_keeps_its_own_weights() -> None:
    target = TargetAdapter(tiny_llama())
    grid = measure_grid(target, [OWN, TREES, ALL])
    assert [way.compute for way in grid.ways] == [OWN, TREES, ALL]
    assert all(way.token > 0 and way.tree > 0 for way in grid.ways)
    assert not target.modules.is_packed


def test_a_target_with_few_positions_is_measured_with_small_trees() -> None:
    model = tiny_llama(vocab=23, max_position_embeddings=32)
    costs = measure_costs(TargetAdapter(model))
    assert 1 < len(costs.verify) < len(NODE_COUNTS)
    decoder = SpeculativeDecoder(model, LookupDrafter())
    assert len(decoder.generate([1, 2, 1, 2], max_new_tokens=9).new_token_ids) == 9


def test_reordered_weights_that_were_asked_for_must_be_possible() -> None:
    with pytest.raises(TargetNotSupported, match="cannot be reordered"):
        SpeculativeDecoder(tiny_llama().to(torch.float16), packed=True)


def test_the_choice_changes_neither_the_text_nor_the_threads_of_the_process() -> None:
    model, before = tiny_llama(vocab=23), torch.get_num_threads()
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    expected = SpeculativeDecoder(model).generate(prompt, max_new_tokens=30).new_token_ids
    for threads in ("auto", 2):
        decoder = SpeculativeDecoder(
            model, LookupDrafter(), threads=threads, packed="auto", tree="fixed"
        )
        assert decoder.generate(prompt, max_new_tokens=30).new_token_ids == expected
        assert torch.get_num_threads() == before
