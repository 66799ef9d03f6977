"""One draft tree as SVG."""

from markupsafe import Markup

from inference.comparison.document import ExampleTree
from inference.comparison.page.palette import expert_color
from inference.comparison.page.tree_layout import GAP, ROW, Box, lay_out
from inference.comparison.page.wording import printable

_BOX = 20  # pixels: height of a box


def draw_tree(tree: ExampleTree) -> Markup:
    """Return an `<svg>` element that shows a tree.

    Every candidate is a `<g class="node">` with `data-expert`; the accepted ones have the class
    `accepted`, too. The root is a `node root`, the target's own token a `node target`.
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
    turn = f"H{middle - 5:.1f}q5 0 5 5v{down - 10}q0 5 5 5" if down else ""
    path = f"M{start:.1f} {parent.middle}{turn}H{end:.1f}"
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
