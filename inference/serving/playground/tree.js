// The draft tree of a decoding step, laid out from left to right.

import { makeSvg } from "./dom.js";
import { paint, visible } from "./palette.js";

const ROW = 32;
const BOX = 22;
const GAP = 18;
const MARGIN = 8;
const CELL = 7.25; // width of a character of the monospaced font in pixels
const PADDING = 9;
const LONGEST = 13;

/** Returns the boxes of a tree with their rows, and the left edge of each column. */
export function layOut(tree) {
  const root = { text: visible(tree.root, LONGEST), depth: 0, kind: "root", children: [] };
  const boxes = [root];
  let last = root;
  for (const node of tree.nodes) {
    const parent = boxes[node.parent + 1];
    const kind = node.accepted ? "accepted" : "rejected";
    const box = { node, text: visible(node.text, LONGEST), depth: parent.depth + 1, kind, parent, children: [] };
    parent.children.push(box);
    boxes.push(box);
    if (node.accepted) last = box;
  }
  if (tree.next !== null) {
    const box = { text: visible(tree.next, LONGEST), depth: last.depth + 1, kind: "next", parent: last, children: [] };
    last.children.unshift(box);
    boxes.push(box);
  }
  return { boxes, rows: assignRows(root), ...columns(boxes) };
}

/** Gives each box the first row with room for it and its chain of first children; returns the number. */
function assignRows(root) {
  const free = []; // first free row of each column
  const stack = [root];
  while (stack.length) {
    const box = stack.pop();
    if (box.row === undefined) {
      const chain = chainOf(box);
      const row = Math.max(box.parent?.row ?? 0, ...chain.map((link) => free[link.depth] ?? 0));
      for (const link of chain) {
        link.row = row;
        free[link.depth] = row + 1;
      }
    }
    stack.push(...box.children.toReversed());
  }
  return Math.max(...free);
}

/** Returns a box, its first child, the first child of that, and so on. */
function chainOf(box) {
  const chain = [];
  for (let link = box; link; link = link.children[0]) {
    link.children.sort((a, b) => (a.kind === "rejected") - (b.kind === "rejected"));
    chain.push(link);
  }
  return chain;
}

function columns(boxes) {
  const widths = [];
  for (const box of boxes) {
    const width = CELL * cells(box.text) + 2 * PADDING;
    widths[box.depth] = Math.max(widths[box.depth] ?? 0, width);
  }
  const lefts = [];
  let left = MARGIN;
  for (const width of widths) {
    lefts.push(left);
    left += width + GAP;
  }
  return { widths, lefts, width: left - GAP + MARGIN };
}

/** Returns the number of columns of a monospaced font that a text takes. */
function cells(text) {
  let count = 0;
  for (const character of text) count += character.codePointAt(0) > 0x1100 ? 2 : 1;
  return count;
}

/** Returns the tree as an SVG element. */
export function drawTree(tree, describe) {
  const { boxes, rows, widths, lefts, width } = layOut(tree);
  const height = rows * ROW + 2 * MARGIN;
  const svg = makeSvg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", summary(tree));
  const middle = (box) => MARGIN + box.row * ROW + ROW / 2;
  for (const box of boxes.filter((own) => own.parent).sort(byImportance)) {
    const start = lefts[box.parent.depth] + widths[box.parent.depth];
    svg.append(makeSvg("path", { class: `edge ${box.kind}`, d: curve(start, middle(box.parent), lefts[box.depth], middle(box)) }));
  }
  for (const box of boxes) svg.append(drawBox(box, lefts[box.depth], middle(box), widths[box.depth], describe));
  return svg;
}

function byImportance(a, b) {
  return (a.kind !== "rejected") - (b.kind !== "rejected");
}

function curve(x, y, toX, toY) {
  if (y === toY) return `M${x} ${y}H${toX}`;
  const half = (x + toX) / 2;
  return `M${x} ${y}C${half} ${y} ${half} ${toY} ${toX} ${toY}`;
}

function drawBox(box, x, y, width, describe) {
  const group = makeSvg("g", { class: `node ${box.kind}` });
  if (box.node) paint(group, box.depth, box.node.source);
  group.dataset.tip = describe(box);
  const top = y - BOX / 2;
  group.append(makeSvg("rect", { x, y: top, width, height: BOX, rx: 6 }));
  const probability = box.node?.probability;
  if (probability) {
    const length = Math.max((width - 12) * probability, 1);
    group.append(makeSvg("rect", { class: "probability", x: x + 6, y: top + BOX - 4, width: length, height: 2, rx: 1 }));
  }
  group.append(makeSvg("text", { x: x + width / 2, y: y + 3.5 }, box.text));
  return group;
}

function summary(tree) {
  const accepted = tree.nodes.filter((node) => node.accepted).map((node) => visible(node.text));
  const path = accepted.length ? `accepted: ${accepted.join(", ")}` : "none accepted";
  const next = tree.next === null ? "" : `; then the target's own token ${visible(tree.next)}`;
  return `Draft tree with ${tree.nodes.length} candidates, ${path}${next}`;
}
