// Counts and rates of one answer, computed from the details of its stream.

/** Steps and tokens of one answer. */
export class Meter {
  constructor() {
    this.steps = [];
    this.tokens = [];
    this.emitted = 0; // number of tokens of the steps, some of which may not have arrived yet
    this.perDepth = new Map();
    this.perSource = new Map();
  }

  add({ tokens, steps }) {
    for (const step of steps) {
      this.steps.push({ ...step, tokens: [] });
      this.emitted += step.emitted;
    }
    for (const token of tokens) {
      this.tokens.push(token);
      this.steps[token.step].tokens.push(token);
      count(this.perDepth, token.depth);
      count(this.perSource, token.source);
    }
  }

  /** Tokens per decoding step after the first token; null before there is such a step. */
  get tau() {
    return this.steps.length > 1 ? this.decoded / (this.steps.length - 1) : null;
  }

  /** Tokens per second after the first token, by the server's clock; null if unknown. */
  get rate() {
    const seconds = this.steps.length > 1 ? this.steps.at(-1).seconds - this.steps[0].seconds : 0;
    return seconds > 0 ? this.decoded / seconds : null;
  }

  /** Number of tokens after the first one, which the prefill selects. */
  get decoded() {
    return this.emitted - (this.steps[0]?.emitted ?? 0);
  }
}

function count(counts, key) {
  counts.set(key, (counts.get(key) ?? 0) + 1);
}
