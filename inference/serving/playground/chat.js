// The conversation: its requests, and the answers to them.

import { Answer } from "./answer.js";
import { chat } from "./api.js";
import { byId, make, oncePerFrame } from "./dom.js";
import { Meter } from "./meter.js";

const AUTOREGRESSIVE_TOKENS = 32;
const FEWEST_TOKENS = 8; // of an answer after which autoregressive decoding is measured

/** A chat with one model. An exchange that has failed is not part of later requests. */
export class Chat {
  constructor(settings, insight, { onState, onStatus }) {
    this.settings = settings;
    this.insight = insight;
    this.onState = onState; // called when an answer begins or ends
    this.onStatus = onStatus; // called with a text for screen readers
    this.model = null;
    this.exchanges = []; // {question, answer, meter, isUsable}
    this.running = null; // controller of the answer that is being received
    this.measuring = null; // controller of the measurement of autoregressive decoding
  }

  get isRunning() {
    return this.running !== null;
  }

  stop() {
    this.running?.abort();
    this.measuring?.abort();
  }

  /** Forgets everything. */
  clear() {
    this.stop();
    this.running = null;
    this.exchanges = [];
    this.insight.show(null, null);
    for (const message of byId("messages").querySelectorAll(".message")) message.remove();
    byId("welcome").hidden = false;
  }

  async ask(question) {
    if (this.isRunning) return;
    this.measuring?.abort();
    const exchange = this.#begin(question);
    const { answer, meter } = exchange;
    const controller = new AbortController();
    this.running = controller;
    this.onState();
    this.onStatus("The answer begins.");
    let failure = null;
    try {
      await this.#receive(exchange, controller.signal);
      exchange.isUsable = true;
    } catch (error) {
      if (error.name !== "AbortError") failure = error;
      exchange.isUsable = error.name === "AbortError" && answer.text !== "";
      exchange.end = failure ? "failed" : "stopped";
    }
    answer.finish();
    if (this.running === controller) this.running = null;
    if (!this.exchanges.includes(exchange)) return; // the chat was cleared meanwhile
    this.#footer(exchange);
    if (failure) this.#showFailure(exchange, failure);
    else this.onStatus(`The answer ${exchange.end === "stopped" ? "was stopped" : "is complete"}: ${meter.tokens.length} tokens.`);
    this.onState();
    if (!failure && exchange.end !== "stopped") this.#consider(exchange);
  }

  /** Measures decoding without drafts with the beginning of an exchange. */
  async measure(exchange) {
    const controller = new AbortController();
    this.measuring = controller;
    byId("measure").hidden = true;
    byId("autoregressive-note").textContent = "Measuring decoding without drafts …";
    const meter = new Meter();
    const body = { ...exchange.body, max_tokens: AUTOREGRESSIVE_TOKENS, jakiro: { details: true, drafting: false } };
    try {
      for await (const chunk of chat(body, this.settings.key, controller.signal)) {
        if (chunk.jakiro?.steps) meter.add(chunk.jakiro);
      }
      if (meter.rate) this.insight.setAutoregressive({ rate: meter.rate, tokens: meter.decoded });
    } catch {
      byId("autoregressive-note").textContent = "Decoding without drafts was not measured yet.";
    }
    if (this.measuring === controller) this.measuring = null;
    byId("measure").hidden = false;
  }

  /** Measures autoregressive decoding again, with the last exchange. */
  measureAgain() {
    const last = this.exchanges.findLast((own) => own.isUsable);
    if (last && !this.isRunning && !this.measuring) this.measure(last);
  }

  #begin(question) {
    byId("welcome").hidden = true;
    const element = make("article", "message question");
    element.setAttribute("aria-label", "Question");
    element.append(make("div", "body", question, { dir: "auto" }));
    const meter = new Meter();
    const answer = new Answer((own, number) => {
      const step = number === null ? null : own.tokens[number].token.step;
      this.insight.show(own, meter, step);
      if (number !== null) this.onStatus(own.describe(number));
    });
    byId("messages").append(element, answer.element);
    const exchange = { question, answer, meter, isUsable: false, end: null, element, body: this.#body(question) };
    this.exchanges.push(exchange);
    this.insight.show(answer, meter);
    scrollToEnd();
    return exchange;
  }

  #body(question) {
    const messages = [];
    if (this.settings.system) messages.push({ role: "system", content: this.settings.system });
    for (const { question: earlier, answer } of this.exchanges.filter((own) => own.isUsable)) {
      messages.push({ role: "user", content: earlier }, { role: "assistant", content: answer.text });
    }
    messages.push({ role: "user", content: question });
    const jakiro = { details: true, drafting: this.settings.drafts };
    return { model: this.model, messages, ...this.settings.fields(), jakiro };
  }

  async #receive(exchange, signal) {
    const { answer, meter } = exchange;
    const arrived = []; // tokens that are not shown yet
    const show = () => {
      if (!arrived.length) return;
      const isAtEnd = atEnd();
      answer.add(arrived.splice(0));
      this.#footer(exchange);
      if (isAtEnd) scrollToEnd();
    };
    const showSoon = oncePerFrame(show); // each time, the browser lays the whole answer out
    try {
      for await (const chunk of chat(exchange.body, this.settings.key, signal)) {
        exchange.end = chunk.choices[0]?.finish_reason ?? exchange.end;
        if (!chunk.jakiro?.steps) continue;
        meter.add(chunk.jakiro);
        arrived.push(...chunk.jakiro.tokens);
        showSoon();
        if (this.insight.answer === answer) this.insight.refresh();
      }
    } finally {
      show();
    }
  }

  #footer({ answer, meter, end, body }) {
    const parts = [`${meter.tokens.length} ${meter.tokens.length === 1 ? "token" : "tokens"}`];
    if (meter.tau && body.jakiro.drafting) parts.push(`tau ${meter.tau.toFixed(2)}`);
    if (meter.rate) parts.push(`${meter.rate.toFixed(1)} tokens/s`);
    if (!body.jakiro.drafting) parts.push("without drafts");
    if (end === "length") parts.push("reached the largest number of tokens");
    if (end === "stopped") parts.push("stopped");
    answer.footer.textContent = parts.join("  ·  ");
  }

  /** Uses an answer without drafts as the rate of autoregressive decoding, or measures that rate once. */
  #consider(exchange) {
    const { meter, body } = exchange;
    if (meter.tokens.length < FEWEST_TOKENS) return;
    if (!body.jakiro.drafting) this.insight.setAutoregressive({ rate: meter.rate, tokens: meter.decoded });
    else if (!this.insight.autoregressive && this.settings.compares) this.measure(exchange);
  }

  #showFailure(exchange, error) {
    const { answer, element, question } = exchange;
    const card = make("div", "failure");
    card.setAttribute("role", "alert");
    card.append(make("strong", "", error.message ?? "Something went wrong"));
    const hint = hintOf(error);
    if (hint) card.append(make("p", "", hint));
    const buttons = make("div", "buttons");
    if (error.status === 401) {
      buttons.append(make("button", "quiet", "Enter a key", { type: "button", onclick: () => this.settings.open("key") }));
    }
    const again = make("button", "quiet", "Try again", { type: "button" });
    again.addEventListener("click", () => {
      if (this.isRunning) return;
      this.exchanges.splice(this.exchanges.indexOf(exchange), 1);
      element.remove();
      answer.element.remove();
      byId("prompt").focus();
      this.ask(question);
    });
    buttons.append(again);
    card.append(buttons);
    answer.element.append(card);
    answer.element.classList.add("failed");
    scrollToEnd();
  }
}

function hintOf(error) {
  if (error.code === "unreachable") return "Is the server running? The page shows when it is back.";
  if (error.code === "cut") return "The text so far is shown, but is not part of the chat.";
  if (error.status === 401) return "This server requires an API key; enter it in the settings.";
  if (error.retryAfter) return `The server asks to wait ${error.retryAfter} s before the next try.`;
  return error.remedy ? `Remedy: ${error.remedy}.` : null;
}

function atEnd() {
  const log = byId("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function scrollToEnd() {
  const log = byId("log");
  log.scrollTop = log.scrollHeight;
}
