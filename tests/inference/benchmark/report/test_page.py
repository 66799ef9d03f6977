import re
from functools import cache
from html import escape
from html.parser import HTMLParser
from itertools import combinations
from random import Random
from xml.etree import ElementTree

import pytest
from helpers.comparisons import make_document, make_tree

from inference.benchmark.document import ComparisonDocument
from inference.benchmark.report import style as wording
from inference.benchmark.report.page import render
from inference.benchmark.report.style import looks
from inference.benchmark.report.tree_picture import draw_tree
from inference.benchmark.report.verdict import verdict

METHODS = ("transformers", "autoregressive", "drafter=mine", "drafter=other,tree=auto")
HOSTILE = '<script>alert(1)</script> $x$ \x00\x1b[31m\u202e 漢字 🙂 "\'&amp; #010101 id="a"'


@cache
def rich_page() -> str:
    return render(rich_document())


def rich_document() -> ComparisonDocument:
    return make_document(
        METHODS, (0.0, 0.8), ("chat", "code"), experts=(2, 4), tree_sizes=(8, 60), depth=5
    )


def with_figures(document: ComparisonDocument, index: int, **changes: object) -> ComparisonDocument:
    methods = list(document.methods)
    methods[index] = methods[index].model_copy(update=changes)
    return document.model_copy(update={"methods": tuple(methods)})


class Tags(HTMLParser):
    """A parser that records all tags and checks that they are closed in order."""

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
        *("All figures", "Speed-up", "Acceptance by depth", "Time by phase", "Expert load"),
        *("Speed of every sample", "By category", "Draft trees", "Methods"),
        "Environment and settings",
    ]
    # Five figures and two trees for each temperature, each with a text alternative.
    drawings = Tags(page).named("svg")
    assert len(drawings) == 14
    assert all(one["role"] == "img" and one["aria-label"] for one in drawings)


def test_page_gives_the_figures_of_a_method():
    document = make_document(prompts=6)
    one = document.figures("drafter=mine", 0.0)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", render(document))
    assert f"{one.tau:.2f}<small>[{one.tau_low:.2f}, {one.tau_high:.2f}]</small>" in cells
    assert (
        f"{one.speedup:.2f}<small>[{one.speedup_low:.2f}, {one.speedup_high:.2f}]</small>" in cells
    )
    assert "41.2 / 73.3" in cells
    assert "15.2 GiB" in cells


def test_page_marks_rows_of_too_few_prompts_and_shows_no_interval_there():
    document = make_document(categories=("chat", "code"), prompts=8)
    page = render(document)
    one = document.figures("drafter=mine", 0.0)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert (
        f"{one.speedup:.2f}<small>[{one.speedup_low:.2f}, {one.speedup_high:.2f}]</small>" in cells
    )
    speedup = one.categories["chat"].speedup
    assert f"{speedup:.2f}<small>too few prompts</small>" in cells
    document = make_document(prompts=4)
    page = render(document)
    one = document.figures("drafter=mine", 0.0)
    assert "drafter=mine <small>too few prompts</small>" in page.replace("<wbr>", "")
    assert f"<td>{one.speedup:.2f}</td>" in page
    assert f"[{one.speedup_low:.2f}, {one.speedup_high:.2f}]" not in page
    assert f"[{one.tau_low:.2f}, {one.tau_high:.2f}]" not in page


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
    document = make_document(("autoregressive", HOSTILE), categories=("chat", HOSTILE))
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
    page = render(make_document(("autoregressive", name)))
    assert Tags(page).open == []
    legend = page[page.index('id="acceptance-0-legend') :].partition("</svg>")[0]
    assert f">{escape(wording.printable(name), quote=False)}</text>" in legend


def test_autoregressive_decoding_alone_makes_a_page():
    page = render(make_document(("autoregressive",)))
    assert "Only <code>autoregressive</code>: " in page
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
    tree = make_tree("drafter=mine", 0.0, 12, 4, 3, Random(1))
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
    tree = make_tree("drafter=mine", 0.0, 30, 6, 2, Random(2))
    nodes = ElementTree.fromstring(draw_tree(tree)).findall("g")
    path = [one for one in nodes if one.get("class") != "node"]
    assert len({one.find("rect").get("y") for one in path}) == 1


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


def measured(
    speeds: dict[str, tuple[float, float, float]], prompts: int = 8, noise: float = 0.0
) -> ComparisonDocument:
    """Return methods with these speed-ups over `autoregressive` and samples of the same speeds.

    Args:
        speeds: speed-up and the ends of its interval, by method.
        prompts: number of prompts; the baseline's speed on them is independent of the others'.
        noise: factor by which every other prompt slows down the methods alternately.
    """
    document = make_document(("autoregressive", *speeds), prompts=prompts)
    for index, (speedup, low, high) in enumerate(speeds.values(), start=1):
        samples = tuple(
            one.model_copy(
                update={"seconds": (1 + noise * ((at + index) % 2) + at) / speedup, "tokens": 100}
            )
            for at, one in enumerate(document.methods[index].samples)
        )
        figures = {"speedup": speedup, "speedup_low": low, "speedup_high": high}
        document = with_figures(document, index, samples=samples, **figures)
    return document


def said_of(document: ComparisonDocument) -> str:
    return verdict(document, 0.0, looks(document)).striptags()


def test_verdict_gives_the_speed_up_with_its_interval():
    said = said_of(measured({"drafter=a": (2.0, 1.8, 2.2)}))
    assert said.startswith(
        "Speed-ups are relative to autoregressive, with 95% intervals. "
        "Faster: drafter=a 2.00 [1.80, 2.20]."
    )
    assert said.endswith("Identical to the target's own greedy tokens: all methods.")
    assert "fastest" not in said


def test_verdict_decides_a_lead_by_the_prompts_that_both_decoded():
    """Intervals that overlap because they share a baseline decide nothing."""
    speeds = {"drafter=a": (2.0, 1.8, 2.2), "drafter=b": (1.9, 1.7, 2.1)}
    said = said_of(measured(speeds))
    assert "Faster: drafter=a 2.00 [1.80, 2.20] and drafter=b 1.90 [1.70, 2.10]." in said
    assert "drafter=a is the fastest: 1.05 [1.05, 1.05] times the speed of drafter=b." in said
    said = said_of(measured(speeds, noise=2.0))
    assert "drafter=a is not shown to be faster than drafter=b." in said
    assert "fastest" not in said


def test_verdict_names_the_resolved_method_though_another_may_be_faster():
    said = said_of(measured({"drafter=a": (1.3, 0.8, 1.9), "drafter=b": (1.25, 1.2, 1.3)}))
    assert "Faster: drafter=b 1.25 [1.20, 1.30]." in said
    assert "Not distinguishable: drafter=a 1.30 [0.80, 1.90]." in said
    assert "drafter=b is not shown to be faster than drafter=a." in said


def test_verdict_calls_a_method_slower_only_if_that_is_shown():
    said = said_of(measured({"drafter=a": (0.95, 0.92, 0.98), "drafter=b": (0.93, 0.7, 1.3)}))
    assert "Faster" not in said
    assert "Slower: drafter=a 0.95 [0.92, 0.98]." in said
    assert "Not distinguishable: drafter=b 0.93 [0.70, 1.30]." in said


def test_verdict_of_too_few_prompts_says_nothing_about_noise():
    speeds = {"drafter=a": (2.0, 1.8, 2.2), "drafter=b": (0.5, 0.4, 0.6)}
    said = said_of(measured(speeds, prompts=4))
    assert "Too few prompts to compare (4 independent, at least 5 needed)" in said
    assert "drafter=a 2.00 and drafter=b 0.50." in said
    assert "fastest" not in said
    assert "Slower" not in said
    document = measured(speeds, prompts=8)
    for index, one in enumerate(document.methods):
        samples = [each.model_copy(update={"group": each.group // 4}) for each in one.samples]
        document = with_figures(document, index, samples=tuple(samples))
    assert "(2 independent, at least 5 needed)" in said_of(document)


@pytest.mark.parametrize("seed", range(40))
def test_verdict_names_every_method_and_contradicts_no_interval(seed):
    randomness = Random(seed)
    speeds = {}
    for name in ("drafter=a", "drafter=b", "drafter=c", "other"):
        low, middle, high = sorted(randomness.uniform(0.6, 1.6) for _ in range(3))
        speeds[name] = (middle, low, high)
    document = measured(speeds, noise=randomness.choice((0.0, 2.0)))
    said = said_of(document)
    found = {
        kind: {name for name in speeds if name in "".join(re.findall(pattern, said))}
        for kind, pattern in {
            "faster": r"Faster: .*?\]\.",
            "slower": r"Slower: .*?\]\.",
            "open": r"distinguishable: .*?\]\.",
        }.items()
    }
    assert found == {
        "faster": {name for name, (_, low, _) in speeds.items() if low > 1},
        "slower": {name for name, (_, _, high) in speeds.items() if high < 1},
        "open": {name for name, (_, low, high) in speeds.items() if low <= 1 <= high},
    }


def test_verdict_shows_the_share_of_identical_samples():
    document = make_document(("autoregressive", "drafter=mine", "drafter=b"))
    document = with_figures(document, 1, identical_to_target=False, identical_share=0.75)
    document = with_figures(document, 2, identical_to_target=False, identical_share=0.75)
    said = said_of(document)
    assert "greedy tokens: drafter=mine 75% and drafter=b 75%." in said
    unknown = with_figures(make_document(), 1, identical_to_target=None, identical_share=None)
    assert said_of(unknown).endswith(" greedy tokens: autoregressive.")


def test_twelve_methods_look_different():
    names = [
        f"drafter=/somewhere/far/away/in/a/long/path/run-{number}/last,x=1" for number in range(12)
    ]
    found = looks(make_document(["autoregressive", *names]))
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
