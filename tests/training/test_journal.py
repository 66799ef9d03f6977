"""What TensorBoard shows: numbers, histograms, and a draft tree."""

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from inference.comparison.document import ExampleTree, TreeNode
from training.histogram import NUM_BINS
from training.journal import Journal, read_evaluations
from training.tree_image import tree_image

NODES = (
    TreeNode(token=" a", parent=-1, depth=1, expert=0, accepted=True),
    TreeNode(token="\n", parent=-1, depth=1, expert=1, accepted=False),
    TreeNode(token="語", parent=0, depth=2, expert=1, accepted=False),
)
TREE = ExampleTree(
    method="drafter",
    temperature=0.0,
    context="before",
    root="root",
    nodes=NODES,
    next_token="next",
)


def test_the_board_has_scalars_histograms_and_the_tree_of_the_same_steps(tmp_path: Path) -> None:
    counts = [[0] * (NUM_BINS - 1) + [3], [4] + [0] * (NUM_BINS - 1)]
    found = {"experts": {"top_overlap": None, "gate_histogram": counts, "mean_gate": [0.1, 0.9]}}
    journal = Journal(tmp_path, 0)
    journal.write(0, {"evaluation": found})
    journal.show(0, TREE)
    journal.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    tags = board.Tags()
    assert sorted(tags["scalars"]) == [f"evaluation/experts/mean_gate/{one}" for one in (1, 2)]
    assert sorted(tags["histograms"]) == [f"evaluation/experts/gate/{one}" for one in (1, 2)]
    assert tags["images"] == ["draft_tree"]
    value = board.Histograms("evaluation/experts/gate/1")[0].histogram_value
    assert value.num == 3
    assert value.sum == pytest.approx(3 * (1 - 0.5 / NUM_BINS))
    assert board.Images("draft_tree")[0].step == 0
    assert read_evaluations(tmp_path) == [(0, found)]


def test_the_picture_of_a_tree_shows_its_candidates_in_their_experts_colours() -> None:
    image = tree_image(TREE)
    height, width, _ = image.shape
    assert height > 100
    assert width > 200
    colors = {tuple(pixel) for pixel in image.reshape(-1, 3).tolist()}
    assert {(0x77, 0xAA, 0xDD), (0xEE, 0x88, 0x66), (0x00, 0x9E, 0x73)} <= colors
    assert image.dtype == np.uint8
