// A message of the assistant: tokens that can be inspected, and a line with figures.

import { make } from "./dom.js";
import { originOf, paint, visible } from "./palette.js";

/** An answer that grows; `onSelect` is called with the number of a token, or null. */
export class Answer {
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.tokens = [];
    this.text = "";
    this.selected = null;
    this.element = make("article", "message answer");
    this.element.setAttribute("aria-label", "Answer");
    this.body = make("div", "body", null, { tabIndex: 0, dir: "auto" });
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", "Answer; arrow keys inspect its tokens");
    this.footer = make("p", "footer");
    this.element.append(this.body, this.footer);
    this.element.setAttribute("aria-busy", "true");
    this.body.addEventListener("click", (event) => this.#onClick(event));
    this.body.addEventListener("keydown", (event) => this.#onKey(event));
  }

  add(tokens) {
    const spans = document.createDocumentFragment();
    for (const token of tokens) {
      this.text += token.text;
      const span = make("span", "token", token.text);
      span.dataset.number = this.tokens.length;
      paint(span, token.depth, token.source);
      this.tokens.push({ token, span });
      if (token.text) spans.append(span);
    }
    this.body.append(spans);
  }

  /** Ends the answer. */
  finish() {
    this.element.setAttribute("aria-busy", "false");
  }

  describe(number) {
    const { token } = this.tokens[number];
    return `${visible(token.text)}  ${originOf(token)}, step ${token.step}`;
  }

  select(number) {
    if (this.selected !== null) this.#mark(this.selected, false);
    this.selected = number;
    if (number !== null) this.#mark(number, true);
    this.onSelect(this, number);
  }

  /** Removes the selection without a call of `onSelect`. */
  unselect() {
    if (this.selected !== null) this.#mark(this.selected, false);
    this.selected = null;
  }

  #mark(number, isMarked) {
    const { step } = this.tokens[number].token;
    for (let at = number; this.tokens[at]?.token.step === step; at--) this.#style(at, isMarked, number);
    for (let at = number + 1; this.tokens[at]?.token.step === step; at++) this.#style(at, isMarked, number);
  }

  #style(at, isMarked, number) {
    this.tokens[at].span.classList.toggle("same-step", isMarked);
    this.tokens[at].span.classList.toggle("selected", isMarked && at === number);
  }

  #onClick(event) {
    const span = event.target.closest?.(".token");
    if (!span || !getSelection().isCollapsed) return;
    const number = Number(span.dataset.number);
    this.select(number === this.selected ? null : number);
  }

  #onKey(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !this.tokens.length || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const from = this.selected ?? (event.key === "ArrowLeft" ? this.tokens.length : -1);
    this.select(Math.min(Math.max(from + moves[event.key], 0), this.tokens.length - 1));
    this.tokens[this.selected].span.scrollIntoView({ block: "nearest" });
  }
}
