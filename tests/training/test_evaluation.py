"""The overlap of experts, compared with values computed by hand."""

import json
import math
from itertools import combinations
from pathlib import Path
from statistics import mean

import pytest
import torch
from helpers.models import tiny_settings
from helpers.training import random_batch, tiny_run, tiny_training

from training.evaluation import ExpertOverlap, summary_of, top_overlap
from training.loss.drafting import draft_all_positions
from training.processes import Processes
from training.train import train

ALONE = Processes(rank=0, count=1, device=torch.device("cpu"))


def test_the_overlap_is_that_counted_by_hand() -> None:
    training = tiny_training(tiny_settings(num_experts=4, combine="mixture"))
    batch = random_batch((9, 11), (20,), samples=2)
    found, overlaps = ExpertOverlap(ALONE), []
    for sample, output in enumerate(
        draft_all_positions(training.drafter, training.view(batch), batch)
    ):
        found.add(batch, training.target.logits, sample, output)
        selected = batch.targets_exist(1) & (torch.arange(24) > batch.anchors[:, sample])
        for sequence, position in selected.nonzero().tolist():
            distributions = training.target.logits(output.features[sequence, position, 0])
            tops = [set(probs.topk(4).indices.tolist()) for probs in distributions]
            overlaps.append(mean(len(a & b) / 4 for a, b in combinations(tops, 2)))
    assert found.read()["top_overlap"] == pytest.approx(mean(overlaps))


def test_equal_experts_have_everything_in_common_and_different_ones_nothing() -> None:
    logits = torch.arange(12.0)
    same = torch.stack([logits, 2 * logits])[None]
    other = torch.stack([logits, -logits])[None]
    assert top_overlap(same).tolist() == [1.0]
    assert top_overlap(other).tolist() == [0.0]
    assert top_overlap(torch.cat([same, other], dim=1)).tolist() == pytest.approx([0.5])
    assert top_overlap(torch.zeros(2, 2, 3)).tolist() == [
        1.0,
        1.0,
    ]  # there are only three tokens


def test_a_trained_drafter_knows_how_different_its_experts_are(workshop: Path) -> None:
    folder = train(tiny_run(workshop, steps=2))
    record = json.loads((folder / "config.json").read_text())["record"]
    experts = record["evaluation"]["experts"]
    assert 0 <= experts["top_overlap"] <= 1
    assert 0 <= record["evaluation"]["validation"]["router_entropy"] <= math.log(2) + 1e-9


def test_acceptance_is_recorded_along_the_paths_of_decoding(workshop: Path) -> None:
    settings = tiny_run(workshop, run_folder=str(workshop / "acceptance"), steps=3)
    folder = train(settings)
    record = json.loads((folder / "config.json").read_text())["record"]
    metrics = record["evaluation"]["validation"]
    assert len(metrics["accept_rate"]) == 3  # two passes of a moa trunk and a parallel level
    assert all(0 < rate < 1 for rate in metrics["accept_rate"])
    tau = metrics["tau_probabilistic"]
    assert 1 < tau < 4
    assert f"tau_probabilistic {tau:.2f}, held-out agreement " in summary_of(record["evaluation"])
