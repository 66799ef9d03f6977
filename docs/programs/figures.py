"""Draws one decoding step as `docs/figures/decode-step.svg`: `make figures`.

`docs/figures/decode-step.json` has the step, which a drafter with two experts made in a greedy
text of code.
"""

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from textwrap import dedent
from typing import Any

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
STEP = FIGURES / "decode-step.json"
FIGURE = FIGURES / "decode-step.svg"

INK, MUTED, LINE, PAPER, SOFT = "#1c1f24", "#5d646e", "#d5d9de", "#ffffff", "#f5f6f8"
VERIFIED = "#b4bac2"
EXPERTS = ("#77aadd", "#ee8866")  # Paul Tol's light colors
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, monospace"
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
STYLE = f"""
text {{ font-family: {SANS}; font-size: 12px; fill: {INK}; }}
.mono {{ font-family: {MONO}; }}
.title {{ font-size: 13px; font-weight: 600; }}
.note {{ font-size: 11px; font-weight: 400; fill: {MUTED}; }}
.bold {{ font-weight: 700; }}
.card {{ fill: {PAPER}; stroke: {LINE}; }}
.arrow {{ fill: none; stroke: {MUTED}; stroke-width: 1.6; marker-end: url(#head); }}
.middle {{ text-anchor: middle; }}
.end {{ text-anchor: end; }}
.edge {{ fill: none; stroke: {VERIFIED}; stroke-width: 1.2; }}
.edge.kept {{ stroke: {INK}; stroke-width: 2.4; }}
.dashed {{ stroke-dasharray: 4 3; }}
"""
CHARACTER = 7.3  # pixels: width of a character in the font of tokens
ROW, GAP, TOP = 25, 26, 24  # pixels: a row of the tree, between its columns, above it
SIGNS = str.maketrans({" ": "·", "\n": "↵", "\t": "⇥"})


@dataclass(eq=False)
class Node:
    """A token of the tree: the root, a candidate, or the target's next token (without expert)."""

    token: str
    parent: "Node | None" = None
    expert: int | None = None
    is_kept: bool = True
    row: int = -1
    children: "list[Node]" = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.parent.children.append(self)

    @property
    def text(self) -> str:
        """The token with visible white space."""
        return shown(self.token)

    @property
    def ancestors(self) -> "list[Node]":
        """The node and its ancestors, which it attends to."""
        return [self, *(self.parent.ancestors if self.parent else [])]

    @property
    def depth(self) -> int:
        """Column in the drawing."""
        return len(self.ancestors) - 1

    @property
    def color(self) -> str:
        """Color of its expert."""
        return INK if self.expert is None else EXPERTS[self.expert]


def shown(token: str) -> str:
    """Return a token with visible white space."""
    text = token.translate(SIGNS)
    return text if len(text) <= 12 else f"{text[:6]}…{text[-5:]}"


def draw_step(step: dict[str, Any]) -> str:
    """Return one decoding step as SVG: prompt, drafter, tree, tree mask, accepted tokens."""
    root = Node(step["root"])
    nodes = [root]
    for record in step["nodes"]:
        parent = nodes[record["parent"] + 1]
        nodes.append(Node(record["token"], parent, record["expert"], record["accepted"]))
    last = max((node for node in nodes if node.is_kept), key=lambda node: node.depth)
    following = Node(step["next_token"], last)
    kept = [node for node in nodes[1:] if node.is_kept]

    (tree, tree_width, tree_height) = _tree([*nodes, following])
    (mask, mask_width, mask_height) = _mask(nodes)
    top_height = 128
    left = max(tree_width + 32, 430)
    width = left + mask_width + 32 + 56
    height = max(tree_height, mask_height) + 62
    middle = 16 + top_height + 28
    bottom = middle + height + 28
    candidates = f"{len(nodes) - 1} candidates, colored by expert"
    output = f"{len(kept) + 1} tokens from one forward pass: the accepted path, and the next token"
    parts = [
        *_card(16, 16, 330, top_height, "1  Prompt", "the last token is the root"),
        *_prompt(step["context"], root, 32, 62),
        _arrow(346, 80, 378, 80),
        *_card(378, 16, width - 394, top_height, "2  Drafter", "reads every layer of the target"),
        *_drafter(416, 62),
        _arrow(left - 24, 16 + top_height, left - 24, middle),
        *_card(16, middle, left, height, "3  Draft tree", candidates),
        _moved(tree, 32, middle + 46),
        *_legend(32, middle + height - 18),
        _arrow(left + 16, middle + height / 2, left + 40, middle + height / 2),
        *_card(left + 40, middle, width - left - 56, height, "4  Target", "rows attend to columns"),
        _moved(mask, left + 56, middle + 46),
        _arrow(width - 190, middle + height, width - 190, bottom),
        *_card(16, bottom, width - 32, 84, "5  Output", output),
        *_output([root, *kept, following], 32, bottom + 58),
    ]
    accepted = " ".join(repr(node.token) for node in kept)
    summary = (
        f"One decoding step: the drafter proposes {len(nodes) - 1} candidates as a tree, the"
        f" target verifies all of them in one forward pass and accepts {accepted}; the target's own"
        f" next token is {following.token!r}"
    )
    return _document(width, bottom + 100, parts, summary)


def _prompt(context: str, root: Node, x: float, y: float) -> Iterator[str]:
    """Yield the end of the prompt, with the root."""
    lines = [line for line in context.split("\n") if line.strip()][-3:]
    lines = dedent("\n".join(lines)).split("\n")
    for number, line in enumerate(lines):
        yield _text(x, y + 17 * number, line, "mono")
    end = x + CHARACTER * len(lines[-1]) + 6
    yield from _pill(end, y + 17 * (len(lines) - 1), root.text, INK, PAPER)


def _drafter(x: float, y: float) -> Iterator[str]:
    """Yield the drafter's parts: memory of all layers, trunk, experts."""
    for layer in range(6):
        yield _rect(x, y - 8 + 8 * layer, 62, 6, fill=VERIFIED)
    yield _text(x + 31, y + 56, "keys and values", "note middle")
    yield _arrow(x + 66, y + 15, x + 96, y + 15)
    yield _rect(x + 96, y - 4, 84, 38, fill=SOFT, stroke=MUTED, rx=5)
    yield _text(x + 138, y + 19, "trunk", "middle")
    yield _text(x + 138, y + 56, "level by level", "note middle")
    for expert, color in enumerate(EXPERTS):
        top = y - 8 + 26 * expert
        yield _arrow(x + 182, y + 15, x + 216, top + 10)
        yield _rect(x + 216, top, 78, 20, fill=color, rx=4)
        yield _text(x + 255, top + 14, f"expert {expert}", "middle")
    yield _text(x + 255, y + 56, "different candidates", "note middle")


def _legend(x: float, y: float) -> Iterator[str]:
    """Yield what the borders of the boxes mean."""
    yield _rect(x, y - 10, 20, 12, fill=PAPER, stroke=INK, rx=3)
    yield _text(x + 28, y, "accepted by the target", "note")
    yield _rect(x + 170, y - 10, 20, 12, fill=PAPER, stroke=INK, rx=3, kind="dashed")
    yield _text(x + 198, y, "the target's own next token", "note")


def _output(nodes: Sequence[Node], x: float, y: float) -> Iterator[str]:
    """Yield the root and the tokens that this step adds."""
    root, *accepted, following = nodes
    x += yield from _pill(x, y, root.text, INK, PAPER)
    for node in accepted:
        x += yield from _pill(x, y, node.text, node.color, INK, stroke=INK)
    yield from _pill(x, y, following.text, PAPER, INK, stroke=INK, kind="dashed")


def _tree(nodes: Sequence[Node]) -> tuple[list[str], float, float]:
    """Return the tree as a drawing, with its width and height in pixels."""
    free = [0] * (1 + max(node.depth for node in nodes))  # first free row of each column
    _assign_rows(nodes[0], free)
    columns = [[node for node in nodes if node.depth == depth] for depth in range(len(free))]
    widths = [CHARACTER * max(len(node.text) for node in column) + 14 for column in columns]
    lefts = [3 + sum(widths[:depth]) + GAP * depth for depth in range(len(free))]
    drawing = [
        _text(lefts[depth] + widths[depth] / 2, 12, str(depth), "note middle")
        for depth in range(1, len(free))
    ]
    for node in sorted(nodes[1:], key=lambda node: node.is_kept):  # these lines lie on top
        assert node.parent is not None
        start = lefts[node.depth - 1] + widths[node.depth - 1]
        down, height = (node.row - node.parent.row) * ROW, _middle(node.parent)
        bend = f"H{start + GAP / 2 - 5:.1f}q5 0 5 5v{down - 10}q0 5 5 5" if down else ""
        kind = "edge kept" if node.is_kept else "edge"
        kind += " dashed" if node is nodes[-1] else ""
        path = f"M{start:.1f} {height}{bend}H{lefts[node.depth]:.1f}"
        drawing.append(f'<path class="{kind}" d="{path}"/>')
    for node in nodes:
        left, wide = lefts[node.depth], widths[node.depth]
        is_next = node is nodes[-1]
        fill = PAPER if is_next else node.color
        opacity, stroke = (1, INK) if node.is_kept else (0.45, "none")
        drawing.append(
            f'<g fill-opacity="{opacity}">'
            + _rect(left, _middle(node) - 10, wide, 20, fill=fill, stroke=stroke, rx=4,
                    kind="dashed" if is_next else "")
            + "</g>"
        )  # fmt: skip
        color = PAPER if node is nodes[0] else INK
        kind = "mono middle bold" if node.is_kept else "mono middle"
        drawing.append(_text(left + wide / 2, _middle(node) + 4, node.text, kind, color))
    return drawing, lefts[-1] + widths[-1] + 3, TOP + ROW * max(free)


def _assign_rows(node: Node, free: list[int]) -> None:
    """Give a node and its chain of first children the first row with room, then the others."""
    if node.row < 0:
        chain = [node]
        while chain[-1].children:
            chain.append(_branches(chain[-1])[0])
        row = max(free[link.depth] for link in chain)
        for link in chain:
            link.row, free[link.depth] = row, row + 1
    for child in _branches(node):
        _assign_rows(child, free)


def _branches(node: Node) -> list[Node]:
    return sorted(node.children, key=lambda child: not child.is_kept)


def _middle(node: Node) -> int:
    return TOP + node.row * ROW + ROW // 2


def _mask(nodes: Sequence[Node]) -> tuple[list[str], float, float]:
    """Return the mask of a verification, with its width and height in pixels.

    Each query attends to the prompt and to its ancestors.
    """
    cell, prompt = 20, 66
    labels = 12 + CHARACTER * max(len(node.text) for node in nodes)
    drawing = [
        _text(labels + prompt / 2 - 3, 8, "prompt", "note middle"),
        _text(labels + prompt + cell * len(nodes) / 2, 8, "root and tree", "note middle"),
    ]
    for row, query in enumerate(nodes):
        top = 16 + cell * row
        kind = "mono end bold" if query.is_kept else "mono end"
        drawing.append(_text(labels - 8, top + 14, query.text, kind))
        drawing.append(_rect(labels, top + 1, prompt - 6, cell - 2, fill=VERIFIED))
        for column, key in enumerate(nodes):
            fill = key.color if key in query.ancestors else SOFT
            left = labels + prompt + cell * column
            drawing.append(_rect(left + 1, top + 1, cell - 2, cell - 2, fill=fill))
    return drawing, labels + prompt + cell * len(nodes), cell * len(nodes) + 22


def _document(width: float, height: float, parts: Sequence[str], summary: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(summary)}"'
        f' width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">'
    )
    marker = (
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
        f' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{MUTED}"/></marker></defs>'
    )
    paper = _rect(0, 0, width, height, fill=SOFT, rx=10)
    return "\n".join([head, f"<style>{STYLE}</style>", marker, paper, *parts, "</svg>"]) + "\n"


def _card(x: float, y: float, width: float, height: float, title: str, note: str) -> Iterator[str]:
    yield (
        f'<rect class="card" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        ' rx="8"/>'
    )
    yield (
        f'<text class="title" x="{x + 16:.1f}" y="{y + 24:.1f}">{escape(title)}'
        f'<tspan dx="10" class="note">{escape(note)}</tspan></text>'
    )


def _pill(
    x: float, y: float, text: str, fill: str, ink: str, *, stroke: str = "none", kind: str = ""
) -> Generator[str, None, float]:
    """Yield a token in a box, and return the width of both with a gap."""
    width = CHARACTER * len(text) + 14
    yield _rect(x, y - 14, width, 20, fill=fill, stroke=stroke, rx=4, kind=kind)
    yield _text(x + width / 2, y, text, "mono middle", ink)
    return width + 10


def _moved(drawing: Sequence[str], x: float, y: float) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})">' + "\n".join(drawing) + "</g>"


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
) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        f' rx="{rx}" fill="{fill}" stroke="{stroke}" stroke-width="1.6"/>'
    )


def _text(x: float, y: float, text: str, kind: str = "", color: str = "") -> str:
    style = f' style="fill: {color}"' if color else ""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{style} xml:space="preserve">'
        f"{escape(text)}</text>"
    )


def _arrow(x: float, y: float, end_x: float, end_y: float) -> str:
    return f'<path class="arrow" d="M{x:.1f} {y:.1f}L{end_x:.1f} {end_y:.1f}"/>'


if __name__ == "__main__":
    FIGURE.write_text(draw_step(json.loads(STEP.read_text())))
