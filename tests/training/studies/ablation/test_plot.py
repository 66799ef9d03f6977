"""The picture of a study has a panel for each temperature and kind of trees."""

from pathlib import Path

import pytest
from helpers.studies import made_up_arm, made_up_documents
from matplotlib.image import imread

from training.studies.ablation.analysis import analyse
from training.studies.ablation.plot import plot
from training.studies.ablation.trees import parse_trees

NAMES = ("base", "contrast-loss-off", "a-name-of-many-words-that-is-long", "costs-$1-or-$2")


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_picture_has_a_panel_for_each_temperature(seeds: int, tmp_path: Path) -> None:
    arms = [made_up_arm(name) for name in NAMES]
    effects = {arm.name: 0.0 for arm in arms}
    widths = []
    for temperatures in ((0.0,), (0.0, 1.0)):
        documents = made_up_documents(effects, temperatures, seeds=seeds)
        plot(analyse(documents, arms), tmp_path / "plot.png")
        height, width, _ = imread(tmp_path / "plot.png").shape
        widths.append(width)
        assert 300 < height < 700
    assert widths[1] > 1.5 * widths[0]


def test_a_base_alone_is_plotted_too(tmp_path: Path) -> None:
    plot(analyse(made_up_documents({"base": 0.0}), [made_up_arm("base")]), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size


def test_every_kind_of_trees_has_a_panel(tmp_path: Path) -> None:
    arms = [made_up_arm(name) for name in ("base", "other")]
    widths = []
    for words in (["candidates=8"], ["candidates=8", "tree=deterministic,candidates=60"]):
        trees = parse_trees(words, 8)
        truth = {kind.method(arm.name): 0.0 for arm in arms for kind in trees}
        plot(analyse(made_up_documents(truth), arms, trees), tmp_path / "plot.png")
        widths.append(imread(tmp_path / "plot.png").shape[1])
    assert widths[1] > 1.5 * widths[0]
