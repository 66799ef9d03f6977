import re
from functools import cache
from html import escape
from html.parser import HTMLParser
from itertools import combinations
from random import Random
from xml.etree import ElementTree

import pytest
from helpers.comparisons import make_document, make_tree

from inference.comparison import wording
from inference.comparison.document import ComparisonDocument
from inference.comparison.palette import looks
from inference.comparison.report import render
from inference.comparison.tree_picture import draw_tree
from inference.comparison.verdict import verdict

METHODS = ("transformers", "plain", "drafter=bank", "drafter=other,tree=auto")
HOSTILE = '<script>alert(1)</script> $x$ \x00\x1b[31m\u202e 漢字 🙂 "\'&amp; #010101 id="a"'


@cache
def rich_page() -> str:
    return render(rich_document())


def rich_document() -> ComparisonDocument:
    return make_document(
        METHODS, (0.0, 0.8), ("chat", "code"), experts=(2, 4), tree_sizes=(8, 60), depth=5
    )


def with_figures(document: ComparisonDocument, place: int, **changes: object) -> ComparisonDocument:
    methods = list(document.methods)
    methods[place] = methods[place].model_copy(update=changes)
    return document.model_copy(update={"methods": tuple(methods)})


class Tags(HTMLParser):
    """Notes every tag, and which one closes which."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def boxes_of(drawing: str) -> list[tuple[float, float, float, float]]:
    rectangles = ElementTree.fromstring(drawing).iter("rect")
    sides = [
        [float(one.get(key, "")) for key in ("x", "y", "width", "height")] for one in rectangles
    ]
    return [(x, y, x + width, y + height) for x, y, width, height in sides]


def test_page_shows_every_method_and_every_section():
    page = rich_page()
    for name in METHODS:
        assert name in page.replace("<wbr>", "")
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        *("All figures", "Speed-up", "Acceptance by depth", "Where time goes", "Expert load"),
        *("Speed of every sample", "By category", "Draft trees", "Methods"),
        "Environment and settings",
    ]
    # Five figures and two trees for each temperature, each with words for those who do not see it.
    drawings = Tags(page).named("svg")
    assert len(drawings) == 14
    assert all(one["role"] == "img" and one["aria-label"] for one in drawings)


def test_page_gives_the_figures_of_a_method():
    document = make_document()
    one = document.figures("drafter=bank", 0.0)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", render(document))
    assert f"{one.tau:.2f}<small>[{one.tau_low:.2f}, {one.tau_high:.2f}]</small>" in cells
    assert (
        f"{one.speedup:.2f}<small>[{one.speedup_low:.2f}, {one.speedup_high:.2f}]</small>" in cells
    )
    assert "41.2 / 73.3" in cells
    assert "15.2 GiB" in cells


def test_page_needs_nothing_else():
    page = rich_page()
    assert "http" not in page
    assert "<script" not in page
    assert "<link" not in page
    assert "@import" not in page
    assert " src=" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\((.*?)\)", page))
    assert all(target.startswith("#") for target in re.findall(r'href="(.*?)"', page))


def test_page_is_sound_html():
    tags = Tags(rich_page())
    ids = [attributes["id"] for _, attributes in tags.found if "id" in attributes]
    assert tags.open == []
    assert len(ids) == len(set(ids))


def test_page_names_only_ids_that_it_has():
    page = rich_page()
    ids = set(re.findall(r'\bid="(.*?)"', page))
    used = re.findall(r'(?:url\(|href=")#([^")]*)', page)
    assert used
    assert set(used) <= ids


def test_figures_take_their_ink_from_the_page():
    page = rich_page()
    assert "#010101" not in page
    assert "fill: var(--ink)" in page
    assert "stroke: var(--line)" in page


def test_hostile_text_is_shown_as_it_is():
    document = make_document(("plain", HOSTILE), categories=("chat", HOSTILE))
    tree = document.trees[0]
    node = tree.nodes[0].model_copy(update={"token": HOSTILE})
    hostile = {"context": HOSTILE, "root": HOSTILE, "next_token": "$\n\t $", "nodes": (node,)}
    trees = (tree.model_copy(update=hostile),)
    document = with_figures(document, 1, notes=(HOSTILE,)).model_copy(update={"trees": trees})
    page = render(document)
    assert "<script" not in page
    assert "$x$" in page
    assert "漢字" in page
    assert "#010101" in page  # the stand-in for ink is replaced in tags alone
    assert "$↵⇥·$" in page
    assert all(one.isprintable() or one == "\n" for one in page)
    assert Tags(page).open == []


@pytest.mark.parametrize("name", ["_hidden", "مرحبا नमस्ते", "a\nb", "-->"])
def test_any_name_of_a_method_is_shown(name):
    page = render(make_document(("plain", name)))
    assert Tags(page).open == []
    legend = page[page.index('id="acceptance-0-legend') :].partition("</svg>")[0]
    assert f">{escape(wording.printable(name), quote=False)}</text>" in legend


def test_plain_decoding_alone_makes_a_page():
    page = render(make_document(("plain",)))
    assert "there is nothing to compare it with" in page
    assert "Acceptance by depth" not in page
    assert "Expert load" not in page
    assert "Draft trees" not in page


def test_figures_without_a_number_make_a_page():
    document = make_document()
    nothing = {"tokens": 0, "samples": (), "peak_memory_bytes": None, "identical_share": 0.5}
    wrong = {"speedup": float("nan"), "speedup_low": float("nan"), "speedup_high": float("inf")}
    page = render(with_figures(document, 1, **nothing, **wrong, identical_to_target=False))
    assert not re.search(r"\b(nan|inf)\b", page)
    assert "50%" in page


def test_equal_documents_give_equal_pages():
    document = rich_document()
    again = ComparisonDocument.model_validate_json(document.model_dump_json())
    assert render(document) == render(again) == rich_page()


def test_tree_shows_the_accepted_path_and_the_experts():
    tree = make_tree("drafter=bank", 0.0, 12, 4, 3, Random(1))
    nodes = ElementTree.fromstring(draw_tree(tree)).findall("g")
    experts = [one.get("data-expert") for one in nodes]
    accepted = [one for one in nodes if one.get("class") == "node accepted"]
    assert experts == [None, *(str(node.expert) for node in tree.nodes), None]
    assert [one.findtext("title") for one in accepted] == [
        f"{node.token!r}, depth {node.depth}, expert {node.expert}, accepted"
        for node in tree.nodes
        if node.accepted
    ]
    assert nodes[0].get("class") == "node root"
    assert nodes[-1].get("class") == "node target"
    assert nodes[-1].findtext("text") == "·text"
    colors = {one.get("data-expert"): one.find("rect").get("fill") for one in nodes}
    assert len(set(colors.values())) == len(colors)


def test_accepted_path_goes_straight_to_the_target_s_token():
    tree = make_tree("drafter=bank", 0.0, 30, 6, 2, Random(2))
    nodes = ElementTree.fromstring(draw_tree(tree)).findall("g")
    path = [one for one in nodes if one.get("class") != "node"]
    assert len({one.find("rect").get("y") for one in path}) == 1


@pytest.mark.parametrize("seed", range(5))
def test_no_two_boxes_of_a_tree_overlap(seed):
    drawing = draw_tree(make_tree("drafter=bank", 0.0, 60, 16, 4, Random(seed)))
    boxes = boxes_of(drawing)
    width, height = re.search(r'viewBox="0 0 (\d+) (\d+)"', drawing).groups()
    assert len(boxes) == 62
    assert all(right <= float(width) and low <= float(height) for _, _, right, low in boxes)
    for one, other in combinations(boxes, 2):
        is_beside = one[2] <= other[0] or other[2] <= one[0]
        assert is_beside or one[3] <= other[1] or other[3] <= one[1]


def test_verdict_names_the_fastest_and_its_interval():
    document = make_document(("plain", "drafter=a"))
    fast = with_figures(document, 1, speedup=2.0, speedup_low=1.8, speedup_high=2.2)
    said = verdict(fast, 0.0, looks(fast)).striptags()
    assert "drafter=a is the fastest: 2.00 times the speed of plain" in said
    assert "95% interval 1.80 to 2.20" in said
    assert "Every method gave exactly the tokens" in said


def test_verdict_does_not_settle_what_overlaps():
    document = make_document(("plain", "drafter=a", "drafter=b"))
    close = with_figures(document, 1, speedup=2.0, speedup_low=1.8, speedup_high=2.2)
    close = with_figures(close, 2, speedup=1.9, speedup_low=1.7, speedup_high=2.1)
    said = verdict(close, 0.0, looks(close)).striptags()
    assert "drafter=a leads: 2.00 times" in said
    assert "Its lead over drafter=b is not settled" in said


@pytest.mark.parametrize(
    ("low", "middle", "high", "said"),
    [
        (0.9, 1.1, 1.3, "Nothing is resolved"),
        (0.7, 0.8, 0.9, "No method was faster than plain"),
    ],
)
def test_verdict_admits_that_nothing_was_won(low, middle, high, said):
    figures = {"speedup": middle, "speedup_low": low, "speedup_high": high}
    document = with_figures(make_document(), 1, **figures)
    assert said in verdict(document, 0.0, looks(document)).striptags()


def test_verdict_tells_of_tokens_that_differ():
    different = {"identical_to_target": False, "identical_share": 0.75}
    document = with_figures(make_document(), 1, **different)
    said = verdict(document, 0.0, looks(document)).striptags()
    assert "drafter=bank differed in 25% of its samples." in said


def test_twelve_methods_are_told_apart():
    names = [
        f"drafter=/somewhere/far/away/in/a/long/path/run-{place}/last,x=1" for place in range(12)
    ]
    found = looks(make_document(["plain", *names]))
    assert len({look.label for look in found.values()}) == 13
    assert len({(look.color, look.dash, look.hatch) for look in found.values()}) == 13
    assert all(len(look.label) < 60 for look in found.values())


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (wording.percent(0.9999), ">99%"),
        (wording.percent(1.0), "100%"),
        (wording.percent(0.0432), "4.3%"),
        (wording.significant(1234.5), "1,234"),
        (wording.significant(0.01234), "0.0123"),
        (wording.fixed(float("nan")), wording.NO_NUMBER),
        (wording.size(3 * 2**30), "3.00 GiB"),
        (wording.visible(" a\n\x1b"), "·a↵\\x1b"),
        (wording.shortened("internationalisation", 9), "inte…tion"),
    ],
)
def test_words_and_numbers_are_short_and_visible(said, expected):
    assert said == expected
