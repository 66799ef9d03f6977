"""The tau that a drafter must exceed follows from measured times, and is logged before training."""

import logging
import re
from typing import Any

import pytest
from helpers.training import tiny_run

from inference.autotune.costs import Costs
from training.distributed.processes import launch_environment
from training.evaluation import break_even as module
from training.evaluation.break_even import break_even
from training.setup.preparation import prepare
from training.train import train

COSTS = Costs(verify={0: 1.0, 2: 1.2, 4: 1.4, 24: 2.0}, draft={1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})


def test_the_costs_of_trees_are_relative_to_steps_without_drafts(
    workshop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "known_costs", lambda *_: COSTS)
    settings = tiny_run(
        workshop, drafter={"schedule": {"autoregressive_levels": 2, "parallel_levels": 2}}
    )
    with launch_environment("cpu"):
        inputs = prepare(settings)
        found = break_even(inputs.target, inputs.build_drafter())
    assert (found.smallest, found.largest) == (4, 24)
    assert (found.lowest, found.highest) == pytest.approx((1.4 + 0.2, 2.0 + 0.2))
    assert "tree of 4 candidates costs as much as 1.6 steps without drafts" in str(found)
    assert "with 24 candidates as much as 2.2" in str(found)
    assert str(found).endswith("tau is at most 5")
    assert found.warning is None


@pytest.mark.parametrize(
    ("factor", "experts", "expected"),
    [
        (2.0, 2, ".* with a large tree take .*: decode with fewer candidates, or measure again"),
        (3.0, 2, ".* a tree of any size take .*: set drafter.experts.num_experts=1, or measure"),
        (3.0, 1, ".* with a tree of any size take .*; remedy: measure again while nothing"),
    ],
)
def test_costs_near_the_largest_possible_tau_are_a_warning_with_proposals(
    workshop: Any, monkeypatch: pytest.MonkeyPatch, factor: float, experts: int, expected: str
) -> None:
    verify = {nodes: factor * seconds for nodes, seconds in COSTS.verify.items()} | {0: 1.0}
    monkeypatch.setattr(module, "known_costs", lambda *_: Costs(verify=verify, draft=COSTS.draft))
    drafter = {
        "schedule": {"autoregressive_levels": 2, "parallel_levels": 2},
        "experts": {"num_experts": experts},
    }
    with launch_environment("cpu"):
        inputs = prepare(tiny_run(workshop, drafter=drafter))
        found = break_even(inputs.target, inputs.build_drafter())
    assert found.warning is not None
    assert re.match(expected, found.warning)


def test_a_smaller_draft_vocabulary_is_proposed_only_where_it_is_large(workshop: Any) -> None:
    with launch_environment("cpu"):
        inputs = prepare(tiny_run(workshop))
        drafter = inputs.build_drafter()
    assert not any("draft_vocab_size" in change for change in module._cheaper(drafter))
    drafter.config.target = {**(drafter.config.target or {}), "vocab_size": 128_256}
    assert "set drafter.draft_vocab_size=8192" in module._cheaper(drafter)


def test_a_run_logs_the_tau_before_its_first_step(
    workshop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        train(tiny_run(workshop))
    lines = [record.getMessage() for record in caplog.records]
    (logged,) = (number for number, line in enumerate(lines) if "faster if tau exceeds" in line)
    assert any("drafter, after" in line for line in lines[logged:])
