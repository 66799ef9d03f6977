// The classes by which the style sheet colors tokens, and names for people.

export const DEEPEST = 5; // deeper drafts have the same color
const MOST_SOURCES = 6;
const sources = new Map([["target", 0]]);

/** Returns the number of the color of a depth; 0 for the target's own tokens. */
export function depthColor(depth) {
  return Math.min(depth, DEEPEST);
}

/** Returns the number of the color of a source; 0 for the target itself. */
export function sourceColor(source) {
  if (!sources.has(source)) sources.set(source, 1 + ((sources.size - 1) % MOST_SOURCES));
  return sources.get(source);
}

/** Sets the attributes by which an element is colored. */
export function paint(element, depth, source) {
  element.dataset.depth = depthColor(depth);
  element.dataset.source = sourceColor(source);
}

/** Returns the name of a color number of depths. */
export function depthName(color) {
  if (color === 0) return "target";
  return color === DEEPEST ? `depth ${color} or more` : `depth ${color}`;
}

/** Describes the origin of a token. */
export function originOf(token) {
  if (token.depth === 0) return "selected by the target";
  return `drafted at depth ${token.depth} by ${token.source}`;
}

/** Returns text in which spaces, ends of lines and invisible characters can be seen. */
export function visible(text, most = Infinity) {
  const shown = text
    .replaceAll(" ", "·")
    .replaceAll("\n", "↵")
    .replaceAll("\t", "⇥")
    .replace(/[\p{C}\p{Z}]/gu, "�");
  const characters = Array.from(shown);
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : shown || "∅";
}
