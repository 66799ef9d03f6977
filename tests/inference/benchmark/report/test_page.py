"""The page shows every figure of a document, whatever the names in it, and needs no other file."""

import json
import re
import shlex
from functools import cache
from html import escape, unescape
from html.parser import HTMLParser

import pytest
from helpers.comparisons import dequantized, make_document, with_figures

from inference.benchmark.document import ComparisonDocument
from inference.benchmark.report import style as wording
from inference.benchmark.report.page import MOST_SHOWN, SharedAnswer, _groups, exchanges_of, render
from inference.benchmark.report.style import looks

METHODS = ("transformers", "autoregressive", "drafter=mine", "drafter=other,tree=auto")
HOSTILE = '<script>alert(1)</script> $x$ \x00\x1b[31m\u202e 漢字 🙂 "\'&amp; #010101 id="a"'


@cache
def rich_page() -> str:
    return render(rich_document())


def rich_document() -> ComparisonDocument:
    return make_document(
        METHODS, (0.0, 0.8), ("chat", "code"), experts=(2, 4), tree_sizes=(8, 60), depth=5
    )


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


def test_page_shows_every_method_and_every_section():
    page = rich_page()
    for name in METHODS:
        assert name in page.replace("<wbr>", "")
    headings = re.findall(r"<h2 [^>]*>(.*?)</h2>", page)
    assert headings == [
        *("All figures", "Speed-up", "Acceptance by depth", "Time by phase", "Expert load"),
        *("Speed of every sample", "By category", "Draft trees"),
        *("Prompts and answers", "Methods", "Environment and settings"),
    ]
    # Five figures and two trees for each temperature, each with a text alternative.
    drawings = Tags(page).named("svg")
    assert len(drawings) == 14
    assert all(drawing["role"] == "img" and drawing["aria-label"] for drawing in drawings)


@pytest.mark.parametrize("methods", [METHODS, ("autoregressive",)])
def test_links_at_the_top_lead_to_every_section(methods):
    page = render(make_document(methods))
    links = re.findall(r'<a href="#(.*?)">(.*?)</a>', page)
    assert links == re.findall(r'<h2 id="(.*?)">(.*?)</h2>', page)
    assert page.index("</nav>") < page.index("<h2")


def test_page_shows_prompts_and_answers_which_can_be_collapsed():
    page = rich_page()
    assert page.count("<details><summary>Question ") == 4
    assert '<pre class="context">Question 3?</pre>' in page
    assert '<pre class="context">Answer 3.</pre>' in page


def test_a_drafter_without_experts_has_no_figures_of_experts():
    page = render(make_document(("autoregressive", "lookup"), experts=(1,)))
    assert "Draft trees" in page
    assert "Expert load" not in page
    assert "</i>expert 0" not in page


def test_a_document_without_texts_makes_a_page():
    fields = json.loads(rich_document().model_dump_json())
    del fields["questions"]
    for method in fields["methods"]:
        for sample in method["samples"]:
            del sample["answer"]
    page = render(ComparisonDocument.model_validate_json(json.dumps(fields)))
    assert "Prompts and answers" not in page
    assert Tags(page).open == []


def test_the_command_can_be_pasted_into_a_shell():
    document = make_document()
    words = ("jakiro", "bench", "--prompts", "my prompts.jsonl")
    environment = document.environment.model_copy(update={"argv": words})
    page = render(document.model_copy(update={"environment": environment}))
    (command,) = re.findall(r"command</dt><dd><code>(.*?)</code>", page)
    assert tuple(shlex.split(unescape(command))) == words


def test_times_that_differ_much_between_temperatures_have_their_own_scales():
    document = make_document(temperatures=(0.0, 1.0))
    assert len(set(time_axes(render(document)))) == 1
    for index in (2, 3):
        tokens = document.methods[index].tokens // 3
        document = with_figures(document, index, tokens=tokens)
    assert len(set(time_axes(render(document)))) == 2


def time_axes(page: str) -> list[tuple[str, ...]]:
    """Return the labels of the time axis at each temperature."""
    drawings = re.findall(r'<svg role="img" aria-label="Milliseconds per .*?</svg>', page, re.S)
    axes = [drawing[drawing.index("matplotlib.axis_1") :] for drawing in drawings]
    return [tuple(filter(str.isdecimal, re.findall(r">(\d+)</text>", axis))) for axis in axes]


def test_a_long_text_is_cut_after_a_whole_line():
    (rule,) = re.findall(r"^\.context \{.*?\}", rich_page(), re.M | re.S)
    assert "line-height: 1.5;" in rule
    assert "border-width: .5rem " in rule
    assert "max-height: calc(10 * 1.5em + 1rem);" in rule
    assert "padding" not in rule


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


def test_page_gives_the_cost_of_a_step_in_autoregressive_steps():
    document = make_document(prompts=6)
    (group,) = [group for group in _groups(document, looks(document)) if not group.temperature]
    alone, mine = (document.figures(name, 0.0) for name in ("autoregressive", "drafter=mine"))
    assert group.step_cost(alone) == 1.0
    assert group.step_cost(mine) == mine.step_seconds / alone.step_seconds
    assert f"<td>{group.step_cost(mine):.2f}</td>" in render(document)


def test_page_warns_of_a_busy_machine():
    document = make_document(prompts=6)
    busy = document.environment.model_copy(update={"load_average": 7.0, "num_cpus": 2})
    assert "Other programs were using this machine" in render(
        document.model_copy(update={"environment": busy})
    )
    idle = document.environment.model_copy(update={"load_average": 0.5, "num_cpus": 2})
    assert "Other programs" not in render(document.model_copy(update={"environment": idle}))


def test_page_names_the_dtype_of_the_weights_and_their_gguf_file():
    document = make_document()
    assert "GGUF" not in render(document)
    page = render(dequantized(document, "5" * 64))
    assert "\nbfloat16 (dequantized from a GGUF file) on cpu" in page
    assert "parameters, bfloat16 (dequantized from a GGUF file), " in page
    assert f"SHA-256 of the GGUF file <code>{'5' * 64}</code></dd>" in page


def test_page_says_once_that_prompts_are_too_few_and_shows_no_interval_there():
    document = make_document(categories=("chat", "code"), prompts=8)
    page = render(document)
    one = document.figures("drafter=mine", 0.0)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert (
        f"{one.speedup:.2f}<small>[{one.speedup_low:.2f}, {one.speedup_high:.2f}]</small>" in cells
    )
    speedup = one.categories["chat"].speedup
    assert f"{speedup:.2f}" in cells
    assert page.count("too few prompts") == 1
    assert page.index("too few prompts") > page.index("By category</h2>")
    document = make_document(prompts=4)
    page = render(document)
    one = document.figures("drafter=mine", 0.0)
    assert page.count("too few prompts") == 1
    assert f"<td>{one.speedup:.2f}</td>" in page
    assert f"[{one.speedup_low:.2f}, {one.speedup_high:.2f}]" not in page
    assert f"[{one.tau_low:.2f}, {one.tau_high:.2f}]" not in page
    assert "too few prompts" not in render(make_document(prompts=5))


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
    first, *others = document.methods[1].samples
    samples = (first.model_copy(update={"answer": HOSTILE}), *others)
    document = with_figures(document, 1, samples=samples)
    document = document.model_copy(update={"questions": {first.prompt: HOSTILE}})
    page = render(document)
    assert "<script" not in page
    assert "$x$" in page
    assert "漢字" in page
    assert "#010101" in page  # the placeholder for ink is replaced only inside tags
    assert "$↵⇥·$" in page
    assert all(each.isprintable() or each == "\n" for each in page)
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


def test_methods_with_the_same_answer_share_it() -> None:
    document = make_document(("autoregressive", "drafter=a", "drafter=b"), (0.0, 1.0), prompts=2)
    first, *others = document.methods[2].samples
    other = first.model_copy(update={"answer": "Another one."})
    document = with_figures(document, 2, samples=(other, *others))
    exchange, _ = exchanges_of(document)
    assert exchange.question == "Question 0?"
    assert exchange.answers == [
        SharedAnswer(0.0, ["autoregressive", "drafter=a"], "Answer 0."),
        SharedAnswer(0.0, ["drafter=b"], "Another one."),
        SharedAnswer(1.0, ["autoregressive", "drafter=a", "drafter=b"], "Answer 0."),
    ]


def test_a_page_shows_few_prompts_and_short_titles() -> None:
    document = make_document(prompts=MOST_SHOWN + 5)
    long = dict.fromkeys(document.questions, "word\n" * 100)
    exchanges = exchanges_of(document.model_copy(update={"questions": long}))
    assert len(exchanges) == MOST_SHOWN
    assert all(len(exchange.title) == 90 and "\n" not in exchange.title for exchange in exchanges)


def test_a_document_without_texts_has_no_exchanges() -> None:
    assert exchanges_of(make_document().model_copy(update={"questions": {}})) == []
