"""Drawing of a draft tree as SVG."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from markupsafe import Markup

from inference.benchmark.document import ExampleTree
from inference.benchmark.report.style import cells, expert_color, printable, shortened, visible

ROW, GAP = 25, 26  # pixels: height of a row, width between columns
TOP = 24  # pixels above the tree, for the depths
MARGIN = 3
_CELL, _PADDING = 7.3, 7  # pixels: width of a character, space on each side of a token
_TOKEN_LIMIT = 12  # characters
_NO_ROW = -1  # no row assigned yet


@dataclass(eq=False)
class Box:
    """A box of the drawing: a token of the tree, with its row and its column (the depth)."""

    token: str
    parent: "Box | None"
    depth: int
    kind: str  # CSS classes
    title: str
    expert: int | None = None
    row: int = _NO_ROW
    children: "list[Box]" = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.parent.children.append(self)

    @property
    def is_accepted(self) -> bool:
        """Whether the token is the root, an accepted draft or the target's next token."""
        return self.kind != "node"

    @property
    def branches(self) -> "list[Box]":
        """The children of the box, the accepted child first."""
        return sorted(self.children, key=lambda child: not child.is_accepted)

    @property
    def text(self) -> str:
        """The text of the box, with visible white space."""
        return shortened(visible(self.token), _TOKEN_LIMIT)

    @property
    def middle(self) -> int:
        """The height of the middle of the box, in pixels from the top."""
        return TOP + self.row * ROW + ROW // 2


@dataclass(frozen=True)
class TreeLayout:
    """Boxes with their rows, and the left edges and widths of the columns in pixels."""

    boxes: list[Box]
    lefts: list[float]
    widths: list[float]

    @property
    def size(self) -> tuple[float, int]:
        """The width and height of the drawing, in pixels."""
        rows = 1 + max(box.row for box in self.boxes)
        return self.lefts[-1] + self.widths[-1] + MARGIN, TOP + ROW * rows

    @property
    def in_order(self) -> list[Box]:
        """The boxes in drawing order; accepted boxes come last, so that their lines are on top."""
        return sorted(self.boxes, key=lambda box: box.is_accepted)


def lay_out(tree: ExampleTree) -> TreeLayout:
    """Return the layout of the root, the candidates, and the target's next token."""
    boxes = _boxes(tree)
    _assign_rows(boxes)
    return TreeLayout(boxes, *_columns(boxes))


def _boxes(tree: ExampleTree) -> list[Box]:
    """Return the root, the candidates in the tree's order, and the target's next token."""
    root = last = Box(tree.root, None, 0, "node root", f"root {tree.root!r}")
    boxes = [root]
    for node in tree.nodes:
        fate = "accepted" if node.accepted else "rejected"
        title = f"{node.token!r}, depth {node.depth}, expert {node.expert}, {fate}"
        kind = "node accepted" if node.accepted else "node"
        parent = boxes[node.parent + 1]
        boxes.append(Box(node.token, parent, node.depth, kind, title, node.expert))
        if node.accepted and node.depth > last.depth:
            last = boxes[-1]
    title = f"the target's next token {tree.next_token!r}"
    return [*boxes, Box(tree.next_token, last, last.depth + 1, "node target", title)]


def _assign_rows(boxes: list[Box]) -> None:
    """Assign every box to the first row with room for the box and its chain of first children.

    The subtrees of parents in the same column lie below each other, so no lines cross.
    """
    free = [0] * (1 + max(box.depth for box in boxes))  # first free row of each column
    stack = boxes[:1]
    while stack:
        box = stack.pop()
        if box.row == _NO_ROW:
            chain = list(_first_children(box))
            row = max(free[link.depth] for link in chain)
            for link in chain:
                link.row, free[link.depth] = row, row + 1
        stack.extend(reversed(box.branches))


def _first_children(box: Box) -> Iterator[Box]:
    yield box
    while box.children:
        box = box.branches[0]
        yield box


def _columns(boxes: list[Box]) -> tuple[list[float], list[float]]:
    """Return the left edge and the width of the column of each depth, in pixels."""
    depths = range(1 + max(box.depth for box in boxes))
    texts = [[box.text for box in boxes if box.depth == depth] for depth in depths]
    widths = [_CELL * max(map(cells, column), default=1) + 2 * _PADDING for column in texts]
    lefts = [MARGIN + sum(widths[:depth], 0.0) + GAP * depth for depth in depths]
    return lefts, widths


_BOX = 20  # pixels: height of a box


def draw_tree(tree: ExampleTree) -> Markup:
    """Return an `<svg>` element that shows a tree.

    Every candidate is a `<g class="node">` with `data-expert`; accepted candidates also have the
    class `accepted`. The root has the classes `node root`, and the target's next token has the
    classes `node target`.
    """
    layout = lay_out(tree)
    lefts, widths, size = layout.lefts, layout.widths, layout.size
    edges = [_edge(box, box.parent, lefts, widths) for box in layout.in_order if box.parent]
    nodes = [_node(box, lefts[box.depth], widths[box.depth]) for box in layout.boxes]
    depths = [_depth(at, lefts[at] + widths[at] / 2) for at in range(1, len(lefts))]
    head = Markup(
        '<svg class="tree" role="img" aria-label="{}" width="{:.0f}" height="{}"'
        ' viewBox="0 0 {:.0f} {}">'
    ).format(printable(_alt(tree)), size[0], size[1], size[0], size[1])
    return Markup("\n").join([head, *depths, *edges, *nodes, Markup("</svg>")])


def _edge(box: Box, parent: Box, lefts: list[float], widths: list[float]) -> Markup:
    start, end = lefts[parent.depth] + widths[parent.depth], lefts[box.depth]
    middle, down = start + GAP / 2, (box.row - parent.row) * ROW
    bend = f"H{middle - 5:.1f}q5 0 5 5v{down - 10}q0 5 5 5" if down else ""
    path = f"M{start:.1f} {parent.middle}{bend}H{end:.1f}"
    return Markup('<path class="{}" d="{}"/>').format(box.kind.replace("node", "edge"), path)


def _node(box: Box, left: float, width: float) -> Markup:
    fill = "" if box.expert is None else Markup(' fill="{}"').format(expert_color(box.expert))
    expert = "" if box.expert is None else Markup(' data-expert="{}"').format(box.expert)
    return Markup(
        '<g class="{}"{}><title>{}</title><rect x="{:.1f}" y="{}" width="{:.1f}" height="{}"'
        ' rx="4"{}/><text x="{:.1f}" y="{}">{}</text></g>'
    ).format(
        *(box.kind, expert, printable(box.title), left, box.middle - _BOX // 2, width, _BOX),
        *(fill, left + width / 2, box.middle + 4, box.text),
    )


def _depth(depth: int, middle: float) -> Markup:
    return Markup('<text class="depth" x="{:.1f}" y="12">{}</text>').format(middle, depth)


def _alt(tree: ExampleTree) -> str:
    accepted = ", ".join(repr(node.token) for node in tree.nodes if node.accepted) or "nothing"
    return (
        f"Draft tree of {tree.method} with {len(tree.nodes)} candidates; accepted: {accepted};"
        f" the target's next token: {tree.next_token!r}"
    )
