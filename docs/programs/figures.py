"""Program that draws the figures of the README and the documentation as SVG: `make figures`.

The figures show two files of measured data: `docs/figures/decode-step.json`, which contains one
decoding step of the demo with a toy target, and the results of the demo with a chat model, which
are in `docs/benchmarks/results/`. With `--record DRAFTER`, the program decodes a held-out prompt of
the toy demo again and replaces the first of these files.
DRAFTER is the folder of a drafter of the demo with a toy target: `drafter.path` in the last line
that `make demo ARGS="--preset smoke"` prints.
"""

import argparse
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from textwrap import dedent

from markupsafe import Markup, escape

from inference.benchmark.document import (
    ComparisonDocument,
    ExampleTree,
    MethodFigures,
    read_document,
)
from inference.benchmark.report.style import expert_color, visible
from inference.benchmark.report.tree_picture import draw_tree, lay_out

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
STEP = FIGURES / "decode-step.json"
SPEEDS = ROOT / "docs" / "benchmarks" / "results" / "smollm2-demo.json"

RECORDED_PROMPT = 2  # index among the demo's held-out prompts
NEW_TOKENS = 32

# Pixels of the speed-ups: left end and top of the bars, width of a panel, a speed-up of 1, a row.
BARS, TOP, PANEL, UNIT, ROW = 150, 84, 310, 150, 32
COLORS = {
    "transformers": "#c9ced6",
    "without drafts": "#8a8f98",
    "training-free drafter": "#7fb8dc",
    "trained drafter": "#0072b2",
}
INK, MUTED, LINE, PAPER, SOFT = "#1c1f24", "#5d646e", "#d5d9de", "#ffffff", "#f5f6f8"
VERIFIED = "#b4bac2"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, monospace"
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
STYLE = f"""
text {{ font-family: {SANS}; font-size: 12px; fill: {INK}; }}
.mono, .tree text {{ font-family: {MONO}; }}
.title {{ font-size: 13px; font-weight: 600; }}
.note {{ font-size: 11px; font-weight: 400; fill: {MUTED}; }}
.bold {{ font-weight: 700; }}
.card {{ fill: {PAPER}; stroke: {LINE}; }}
.arrow {{ fill: none; stroke: {MUTED}; stroke-width: 1.6; marker-end: url(#head); }}
.middle, .tree text {{ text-anchor: middle; }}
.end {{ text-anchor: end; }}
.tree .depth {{ font-size: 11px; fill: {MUTED}; }}
.tree .edge {{ fill: none; stroke: {VERIFIED}; stroke-width: 1.2; }}
.tree .edge.accepted, .tree .edge.target {{ stroke: {INK}; stroke-width: 2.4; }}
.tree .edge.target, .dashed {{ stroke-dasharray: 4 3; }}
.tree .node rect {{ fill-opacity: .45; }}
.tree .accepted rect {{ fill-opacity: 1; stroke: {INK}; stroke-width: 2; }}
.tree .accepted text, .tree .target text {{ font-weight: 700; }}
.tree .root rect {{ fill: {INK}; fill-opacity: 1; }}
.tree .root text {{ fill: {PAPER}; }}
.tree .target rect {{ fill: {PAPER}; stroke: {INK}; stroke-width: 1.6; stroke-dasharray: 4 3; }}
"""


def draw_step(tree: ExampleTree) -> str:
    """Return one decoding step as SVG: prompt, drafter, tree, tree mask, accepted tokens."""
    tree_width, tree_height = lay_out(tree).size
    mask = _Mask(tree)
    top_height = 128
    left = max(tree_width + 32, 430)
    width = left + mask.width + 32 + 56
    height = max(tree_height, mask.height) + 62
    middle = 16 + top_height + 28
    bottom = middle + height + 28
    parts = [
        *_card(16, 16, 330, top_height, "1  Prompt", "the last token is the root"),
        *_prompt(tree, 32, 62),
        _arrow(346, 80, 378, 80),
        *_card(378, 16, width - 394, top_height, "2  Drafter", "reads every layer of the target"),
        *_drafter(tree, 416, 62),
        _arrow(left - 24, 16 + top_height, left - 24, middle),
        *_card(16, middle, left, height, "3  Draft tree", _tree_note(tree)),
        _placed(draw_tree(tree), 32, middle + 46),
        *_legend(32, middle + height - 18),
        _arrow(left + 16, middle + height / 2, left + 40, middle + height / 2),
        *_card(left + 40, middle, width - left - 56, height, "4  Target", mask.note),
        *mask.draw(left + 56, middle + 46),
        _arrow(width - 190, middle + height, width - 190, bottom),
        *_card(16, bottom, width - 32, 84, "5  Output", _output_note(tree)),
        *_output(tree, 32, bottom + 58),
    ]
    return _document(width, bottom + 100, parts, _step_summary(tree))


def _legend(x: float, y: float) -> Iterator[Markup]:
    """Yield a legend of the borders of the boxes."""
    yield _rect(x, y - 10, 20, 12, fill=PAPER, stroke=INK, rx=3)
    yield _text(x + 28, y, "accepted by the target", "note")
    yield _rect(x + 170, y - 10, 20, 12, fill=PAPER, stroke=INK, rx=3, kind="dashed")
    yield _text(x + 198, y, "the target's own next token", "note")


def _tree_note(tree: ExampleTree) -> str:
    experts = sorted({node.expert for node in tree.nodes})
    return f"{len(tree.nodes)} candidates, colored by expert ({', '.join(map(str, experts))})"


def _output_note(tree: ExampleTree) -> str:
    count = 1 + sum(node.accepted for node in tree.nodes)
    return f"{count} tokens from one forward pass: the accepted path, and the target's next token"


def _step_summary(tree: ExampleTree) -> str:
    accepted = " ".join(repr(node.token) for node in tree.nodes if node.accepted)
    return (
        f"One decoding step: the drafter proposes {len(tree.nodes)} candidates as a tree, the"
        f" target verifies all of them in one forward pass and accepts {accepted}; the target's own"
        f" next token is {tree.next_token!r}"
    )


def _prompt(tree: ExampleTree, x: float, y: float) -> Iterator[Markup]:
    """Yield the end of the prompt, with the root."""
    lines = [line for line in tree.context.split("\n") if line.strip()][-3:]
    lines = dedent("\n".join(lines)).split("\n")
    for number, line in enumerate(lines):
        yield _text(x, y + 17 * number, line, "mono")
    end = x + 7.3 * len(lines[-1]) + 6
    yield from _pill(end, y + 17 * (len(lines) - 1), tree.root, INK, PAPER)


def _drafter(tree: ExampleTree, x: float, y: float) -> Iterator[Markup]:
    """Yield the drafter's parts: memory of all layers, trunk, experts."""
    for layer in range(6):
        yield _rect(x, y - 8 + 8 * layer, 62, 6, fill=VERIFIED)
    yield _text(x + 31, y + 56, "keys and values", "note middle")
    yield _arrow(x + 66, y + 15, x + 96, y + 15)
    yield _rect(x + 96, y - 4, 84, 38, fill=SOFT, stroke=MUTED, rx=5)
    yield _text(x + 138, y + 19, "trunk", "middle")
    yield _text(x + 138, y + 56, "level by level", "note middle")
    for expert in sorted({node.expert for node in tree.nodes}):
        top = y - 8 + 26 * expert
        yield _arrow(x + 182, y + 15, x + 216, top + 10)
        yield _rect(x + 216, top, 78, 20, fill=expert_color(expert), rx=4)
        yield _text(x + 255, top + 14, f"expert {expert}", "middle")
    yield _text(x + 255, y + 56, "different candidates", "note middle")


def _output(tree: ExampleTree, x: float, y: float) -> Iterator[Markup]:
    """Yield the root and the tokens that this step adds."""
    x += yield from _pill(x, y, tree.root, INK, PAPER)
    for node in tree.nodes:
        if node.accepted:
            x += yield from _pill(x, y, node.token, expert_color(node.expert), INK, stroke=INK)
    yield from _pill(x, y, tree.next_token, PAPER, INK, stroke=INK, dashed=True)


class _Mask:
    """The tree mask of a verification: each query attends to the prompt and to its ancestors."""

    CELL, PROMPT = 20, 66  # pixels
    note = "one forward pass; rows attend to columns"

    def __init__(self, tree: ExampleTree) -> None:
        self._tree = tree
        self._tokens = [tree.root, *(node.token for node in tree.nodes)]
        self._labels = 12 + 7.3 * max(len(visible(token)[:9]) for token in self._tokens)

    @property
    def width(self) -> float:
        """Width in pixels."""
        return self._labels + self.PROMPT + self.CELL * len(self._tokens)

    @property
    def height(self) -> float:
        """Height in pixels."""
        return self.CELL * len(self._tokens) + 22

    def draw(self, x: float, y: float) -> Iterator[Markup]:
        """Yield the labeled rows of the mask."""
        left = x + self._labels
        yield _text(left + self.PROMPT / 2 - 3, y + 8, "prompt", "note middle")
        tree = left + self.PROMPT + self.CELL * len(self._tokens) / 2
        yield _text(tree, y + 8, "root and tree", "note middle")
        for query, token in enumerate(self._tokens):
            top = y + 16 + self.CELL * query
            is_kept = query == 0 or self._tree.nodes[query - 1].accepted
            kind = "mono end bold" if is_kept else "mono end"
            yield _text(left - 8, top + 14, visible(token)[:9], kind)
            yield _rect(left, top + 1, self.PROMPT - 6, self.CELL - 2, fill=VERIFIED)
            seen = set(self._ancestors(query))
            for key in range(len(self._tokens)):
                fill = self._color(key) if key in seen else SOFT
                at = left + self.PROMPT + self.CELL * key
                yield _rect(at + 1, top + 1, self.CELL - 2, self.CELL - 2, fill=fill)

    def _ancestors(self, query: int) -> Iterator[int]:
        """Yield the index of a query and those of its ancestors; 0 is the root."""
        while query:
            yield query
            query = self._tree.nodes[query - 1].parent + 1
        yield 0

    def _color(self, key: int) -> str:
        return expert_color(self._tree.nodes[key - 1].expert) if key else INK


def draw_speedups(document: ComparisonDocument) -> str:
    """Return measured speed-ups as SVG: a panel for each temperature, a bar for each method."""
    methods = [method for method in document.methods if method.name != document.baseline]
    names = list(dict.fromkeys(method.name for method in methods))
    temperatures = sorted({method.temperature for method in methods})
    bottom = TOP + ROW * len(names)
    parts = [
        _text(16, 28, "Speed-up over transformers' generate()", "title"),
        _text(16, 46, _measurement(document), "note"),
        *_names(names),
        *_colors(16, bottom + 44),
    ]
    for number, temperature in enumerate(temperatures):
        rows = [method for method in methods if method.temperature == temperature]
        parts += _panel(rows, BARS + PANEL * number)
    speeds = "; ".join(
        f"{method.name} at T = {method.temperature:g}: {method.speedup:.2f}" for method in methods
    )
    summary = f"Speed-up over transformers' generate(): {speeds}"
    return _document(BARS + PANEL * len(temperatures), bottom + 62, parts, summary)


def _measurement(document: ComparisonDocument) -> str:
    target = document.environment.target
    return (
        f"{target.name_or_path}, {target.dtype}, {document.environment.num_cpus} CPU cores, "
        f"{document.prompts} questions; lines: 95% intervals; tau: tokens per decoding step"
    )


def _names(names: Sequence[str]) -> Iterator[Markup]:
    """Yield the names of the methods, from top to bottom."""
    for number, name in enumerate(names):
        kind = "end bold" if name == names[-1] else "end"
        yield _text(BARS - 12, TOP + ROW * number + 16, name, kind)


def _panel(rows: Sequence[MethodFigures], x: float) -> Iterator[Markup]:
    """Yield the bars of all methods at one temperature, and the line of transformers."""
    temperature = rows[0].temperature
    title = "greedy (T = 0)" if temperature == 0 else f"sampled (T = {temperature:g})"
    yield _text(x, TOP - 12, title)
    for number, method in enumerate(rows):
        yield from _bar(method, x, TOP + ROW * number)
    one, bottom = x + UNIT, TOP + ROW * len(rows)
    yield Markup(f'<path class="dashed" d="M{one} {TOP - 6}V{bottom + 6}" stroke="{INK}"/>')
    yield _text(one, bottom + 20, "transformers = 1", "note middle")


def _bar(method: MethodFigures, x: float, y: float) -> Iterator[Markup]:
    low, high = (x + UNIT * value for value in (method.speedup_low, method.speedup_high))
    middle = y + 12
    whisker = f"M{low:.1f} {middle}H{high:.1f}" + "".join(
        f"M{end:.1f} {middle - 4}v8" for end in (low, high)
    )
    yield _rect(x, y, UNIT * method.speedup, 24, fill=COLORS[_kind(method)])
    yield Markup(f'<path d="{whisker}" fill="none" stroke="{INK}" stroke-width="1.4"/>')
    label = max(high, x + UNIT) + 8  # clear of the line of transformers
    yield _text(label, middle + 4, f"{method.speedup:.2f}", "bold")
    yield _text(label + 34, middle + 4, f"tau {method.tau:.2f}", "note")


def _kind(method: MethodFigures) -> str:
    if method.kind.startswith("transformers"):
        return "transformers"
    if method.kind == "autoregressive":
        return "without drafts"
    return "trained drafter" if method.kind == "drafter" else "training-free drafter"


def _colors(x: float, y: float) -> Iterator[Markup]:
    """Yield a legend of the colors of the bars."""
    for kind, color in COLORS.items():
        yield _rect(x, y - 10, 20, 12, fill=color)
        yield _text(x + 28, y, kind, "note")
        x += 60 + 5.6 * len(kind)


def _document(width: float, height: float, parts: Sequence[Markup], summary: str) -> str:
    head = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{}" width="{:.0f}"'
        ' height="{:.0f}" viewBox="0 0 {:.0f} {:.0f}">'
    ).format(summary, width, height, width, height)
    marker = Markup(
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
        f' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{MUTED}"/></marker></defs>'
    )
    paper = _rect(0, 0, width, height, fill=SOFT, rx=10)
    style = Markup(f"<style>{STYLE}</style>")
    return "\n".join([head, style, marker, paper, *parts, "</svg>"]) + "\n"


def _card(
    x: float, y: float, width: float, height: float, title: str, note: str
) -> Iterator[Markup]:
    yield Markup(
        f'<rect class="card" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        ' rx="8"/>'
    )
    yield Markup('<text class="title" x="{:.1f}" y="{:.1f}">{}<tspan dx="10" class="note">{}'
                 "</tspan></text>").format(x + 16, y + 24, title, note)  # fmt: skip


def _pill(
    x: float,
    y: float,
    token: str,
    fill: str,
    ink: str,
    *,
    stroke: str = "none",
    dashed: bool = False,
) -> Generator[Markup, None, float]:
    """Yield a token in a box, and return its width."""
    text = visible(token)
    width = 7.3 * len(text) + 14
    kind = ' class="dashed"' if dashed else ""
    yield Markup(
        f'<rect{kind} x="{x:.1f}" y="{y - 14:.1f}" width="{width:.1f}" height="20" rx="4"'
        f' fill="{fill}" stroke="{stroke}" stroke-width="1.6"/>'
    )
    style = Markup('<text class="mono middle" x="{:.1f}" y="{:.1f}" style="fill: {}">{}</text>')
    yield style.format(x + width / 2, y, ink, text)
    return width + 10


def _placed(drawing: Markup, x: float, y: float) -> Markup:
    """Return a nested drawing at a position."""
    return Markup(str(drawing).replace("<svg ", f'<svg x="{x:.1f}" y="{y:.1f}" ', 1))


def _rect(
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    fill: str,
    stroke: str = "none",
    rx: float = 2,
    kind: str = "",
) -> Markup:
    return Markup(
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        f' rx="{rx}" fill="{fill}" stroke="{stroke}"/>'
    )


def _text(x: float, y: float, text: str, kind: str = "") -> Markup:
    space = ' xml:space="preserve"'
    return Markup(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{space}>{escape(text)}</text>')


def _arrow(x: float, y: float, end_x: float, end_y: float) -> Markup:
    return Markup(f'<path class="arrow" d="M{x:.1f} {y:.1f}L{end_x:.1f} {end_y:.1f}"/>')


def record(drafter: Path) -> ExampleTree:
    """Decode a held-out prompt greedily with the demo's drafter, and return an example step."""
    from inference.benchmark.example_trees import example_tree
    from inference.benchmark.methods import OwnDecoding, SamplingOptions
    from inference.decoder import SpeculativeDecoder
    from inference.trees.shape import TreeShape
    from jakiro.demo.corpus import load_corpus
    from jakiro.demo.prompts import prompts_from_split

    shape = TreeShape(children=3, breadth=2, num_nodes=8)
    decoder = SpeculativeDecoder.from_pretrained(drafter, tree=shape)
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    prompts = prompts_from_split(load_corpus(), "test", tokenizer, count=RECORDED_PROMPT + 1)
    token_ids = tokenizer.encode(prompts[RECORDED_PROMPT].text, add_special_tokens=False)
    method = OwnDecoding("jakiro", "drafter", decoder)
    sampling = SamplingOptions(temperature=0.0, max_new_tokens=NEW_TOKENS)
    tree = example_tree(method, token_ids, sampling, 0, tokenizer)
    if tree is None:
        raise SystemExit("nothing was drafted")
    return tree


def drawings() -> dict[Path, str]:
    """Return a mapping from the path of each figure to its SVG text."""
    tree = ExampleTree.model_validate_json(STEP.read_bytes())
    return {
        FIGURES / "decode-step.svg": draw_step(tree),
        FIGURES / "speedup.svg": draw_speedups(read_document(SPEEDS)),
    }


def main() -> None:
    """Record a decoding step if `--record` is given, and write every figure."""
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    parser.add_argument("--record", type=Path, metavar="DRAFTER", help="decode with this drafter")
    options = parser.parse_args()
    FIGURES.mkdir(exist_ok=True)
    if options.record is not None:
        STEP.write_text(record(options.record).model_dump_json(indent=1) + "\n")
    for path, drawing in drawings().items():
        path.write_text(drawing)


if __name__ == "__main__":
    main()
