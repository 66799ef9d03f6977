"""The picture of a tree has the accepted path on one line, and no box hides another."""

import re
from itertools import combinations
from random import Random
from xml.etree import ElementTree

import pytest
from helpers.comparisons import make_tree

from inference.benchmark.report.tree_picture import draw_tree


def boxes_of(drawing: str) -> list[tuple[float, float, float, float]]:
    rectangles = ElementTree.fromstring(drawing).iter("rect")
    sides = [
        [float(rectangle.get(key, "")) for key in ("x", "y", "width", "height")]
        for rectangle in rectangles
    ]
    return [(x, y, x + width, y + height) for x, y, width, height in sides]


def test_tree_shows_the_accepted_path_and_the_experts():
    tree = make_tree("drafter=mine", 0.0, 12, 4, 3, Random(1))
    nodes = ElementTree.fromstring(draw_tree(tree)).findall("g")
    experts = [each.get("data-expert") for each in nodes]
    accepted = [each for each in nodes if each.get("class") == "node accepted"]
    assert experts == [None, *(str(node.expert) for node in tree.nodes), None]
    assert [each.findtext("title") for each in accepted] == [
        f"{node.token!r}, depth {node.depth}, expert {node.expert}, accepted"
        for node in tree.nodes
        if node.accepted
    ]
    assert nodes[0].get("class") == "node root"
    assert nodes[-1].get("class") == "node target"
    assert nodes[-1].findtext("text") == "·text"
    colors = {each.get("data-expert"): each.find("rect").get("fill") for each in nodes}
    assert len(set(colors.values())) == len(colors)


def test_accepted_path_goes_straight_to_the_target_s_token():
    tree = make_tree("drafter=mine", 0.0, 30, 6, 2, Random(2))
    nodes = ElementTree.fromstring(draw_tree(tree)).findall("g")
    path = [node for node in nodes if node.get("class") != "node"]
    assert len({each.find("rect").get("y") for each in path}) == 1


@pytest.mark.parametrize("seed", range(5))
def test_no_two_boxes_of_a_tree_overlap(seed):
    drawing = draw_tree(make_tree("drafter=mine", 0.0, 60, 16, 4, Random(seed)))
    boxes = boxes_of(drawing)
    width, height = re.search(r'viewBox="0 0 (\d+) (\d+)"', drawing).groups()
    assert len(boxes) == 62
    assert all(right <= float(width) and low <= float(height) for _, _, right, low in boxes)
    for one, other in combinations(boxes, 2):
        is_beside = one[2] <= other[0] or other[2] <= one[0]
        assert is_beside or one[3] <= other[1] or other[3] <= one[1]
