// The panel that shows how an answer was decoded: figures, legend, steps and draft tree.

import { byId, make, oncePerFrame } from "./dom.js";
import { depthName, depthColor, originOf, paint, sourceColor, visible } from "./palette.js";
import { drawTree } from "./tree.js";

const NO_TREE = byId("tree").firstElementChild; // what stands there at first

const SHOWN_STEPS = 64;

/** The panel; shows the last answer, or the step of a selected token. */
export class Insight {
  constructor() {
    this.answer = null; // whose steps are shown
    this.meter = null;
    this.autoregressive = null; // rate of decoding without drafts, and the number of tokens behind it
    this.step = null; // selected step; null for the last one
    this.refresh = oncePerFrame(() => this.#draw());
    byId("step-back").addEventListener("click", () => this.#move(-1));
    byId("step-on").addEventListener("click", () => this.#move(1));
    byId("strip").addEventListener("click", (event) => this.#onStrip(event));
    for (const radio of document.getElementsByName("colors")) {
      radio.checked = radio.defaultChecked;
      radio.addEventListener("change", () => this.#color(radio.value));
    }
  }

  /** Shows an answer; null for none. */
  show(answer, meter, step = null) {
    if (this.answer !== answer) this.answer?.unselect();
    Object.assign(this, { answer, meter, step });
    this.refresh();
  }

  setAutoregressive(autoregressive) {
    this.autoregressive = autoregressive;
    this.refresh();
  }

  #color(mode) {
    byId("main").dataset.colors = mode;
    this.refresh();
  }

  #move(by) {
    const last = this.meter.steps.length - 1;
    const step = Math.min(Math.max((this.step ?? last) + by, 0), last);
    this.#go(step === last ? null : step);
  }

  #go(step) {
    this.step = step;
    this.answer.unselect();
    this.refresh();
  }

  #onStrip(event) {
    const column = event.target.closest("[data-step]");
    if (column) this.#go(Number(column.dataset.step));
  }

  #draw() {
    this.#drawSpeed();
    this.#drawLegend();
    this.#drawTree();
  }

  #drawSpeed() {
    const { tau, rate } = this.meter ?? { tau: null, rate: null };
    const { autoregressive } = this;
    byId("tau").textContent = tau?.toFixed(2) ?? "–";
    byId("rate").textContent = rate?.toFixed(1) ?? "–";
    byId("speedup").textContent = rate && autoregressive ? `${(rate / autoregressive.rate).toFixed(2)}×` : "–";
    byId("race").hidden = !(rate && autoregressive);
    if (rate && autoregressive) {
      const most = Math.max(rate, autoregressive.rate);
      byId("race-drafted").style.width = `${(100 * rate) / most}%`;
      byId("race-autoregressive").style.width = `${(100 * autoregressive.rate) / most}%`;
    }
    if (autoregressive) {
      byId("autoregressive-note").textContent =
        `Decoding without drafts: ${autoregressive.rate.toFixed(1)} tokens/s, measured on this server with ${autoregressive.tokens} tokens. Other requests slow both down.`;
    }
  }

  #drawLegend() {
    const mode = byId("main").dataset.colors;
    const counts = mode === "source" ? this.meter?.perSource : this.meter?.perDepth;
    const color = mode === "source" ? sourceColor : depthColor;
    const grouped = new Map();
    for (const [key, count] of [...(counts ?? [])].sort(mode === "source" ? byName : byNumber)) {
      const name = mode === "source" ? key : depthName(depthColor(key));
      const entry = grouped.get(name) ?? { color: color(key), count: 0 };
      entry.count += count;
      grouped.set(name, entry);
    }
    const items = [...grouped].map(([name, entry]) => legendItem(name, entry, mode));
    byId("legend").replaceChildren(...(items.length ? items : [legendItem("target", { color: 0, count: null }, mode)]));
  }

  #drawTree() {
    const steps = this.meter?.steps ?? [];
    const last = steps.length - 1;
    const at = this.step ?? last;
    byId("step-back").disabled = at <= 0;
    byId("step-on").disabled = at >= last;
    if (last < 0) {
      byId("step-number").textContent = "no step yet";
      byId("strip").replaceChildren();
      byId("tree").replaceChildren(NO_TREE);
      byId("tree-note").textContent = "";
      return;
    }
    const step = steps[at];
    byId("step-number").setAttribute("aria-live", this.step === null ? "off" : "polite");
    byId("step-number").textContent = `step ${step.step} of ${steps[last].step}`;
    byId("tree").replaceChildren(drawTree(step.tree, describe));
    byId("tree-note").textContent = noteOf(step);
    this.#drawStrip(at);
  }

  #drawStrip(at) {
    const { steps } = this.meter;
    const first = Math.max(0, Math.min(at - SHOWN_STEPS / 2, steps.length - SHOWN_STEPS));
    const shown = steps.slice(first, first + SHOWN_STEPS);
    byId("strip").replaceChildren(...shown.map((step) => stripColumn(step, step.step === at)));
  }
}

function stripColumn(step, isCurrent) {
  const column = make("span", isCurrent ? "current" : "");
  column.dataset.step = step.step;
  column.dataset.tip = `step ${step.step}: ${step.emitted} of ${step.drafted + 1} tokens`;
  for (const token of step.tokens) {
    const cell = make("i");
    paint(cell, token.depth, token.source);
    column.append(cell);
  }
  return column;
}

function legendItem(name, { color, count }, mode) {
  const item = make("li");
  const swatch = make("span", "token", "ab");
  swatch.setAttribute("aria-hidden", "true");
  swatch.dataset[mode === "source" ? "source" : "depth"] = color;
  item.append(swatch, make("span", "", name));
  if (count !== null) item.append(make("span", "count", String(count)));
  return item;
}

function byNumber([a], [b]) {
  return a - b;
}

function byName([a], [b]) {
  return (b === "target") - (a === "target") || a.localeCompare(b, "en", { numeric: true });
}

function noteOf(step) {
  if (step.step === 0) return "Step 0 reads the prompt; its token is the target's own.";
  if (step.drafted === 0) return "Nothing was drafted in this step.";
  const accepted = `${step.accepted} of ${step.drafted} drafts accepted`;
  return `${accepted}. Lines in the boxes: the target's probability of a token after its parent.`;
}

/** Describes a box of the tree. */
function describe(box) {
  if (box.kind === "root") return `${box.text}  the last token before this step`;
  if (box.kind === "next") return `${box.text}  ${originOf({ depth: 0 })}`;
  const { text, source, probability, accepted } = box.node;
  const chance = probability === null ? "" : `, probability ${(100 * probability).toFixed(1)} %`;
  const fate = accepted ? "accepted" : "rejected";
  return `${visible(text)}  ${originOf({ depth: box.depth, source })}, ${fate}${chance}`;
}
