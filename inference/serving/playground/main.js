// The page: message field, buttons, and the state of the server.

import { ApiError, health, modelName } from "./api.js";
import { Chat } from "./chat.js";
import { byId, make } from "./dom.js";
import { Insight } from "./insight.js";
import { Settings } from "./settings.js";
import { installTips } from "./tip.js";

const EXAMPLES = [
  "Write a Python function that checks whether a word is a palindrome.",
  "Count from one to thirty in words.",
  "Why do cats purr?",
];
const RETRY_MS = 3000;

const prompt = byId("prompt");
const send = byId("send");
const insight = new Insight();
const settings = new Settings(connect);
const chat = new Chat(settings, insight, { onState: showState, onStatus: announce });
let retry = null;
let checked = null; // the failed exchange after which the server was asked again

/** Asks for the state of the server and the name of its model, until there is an answer. */
async function connect() {
  clearTimeout(retry);
  let state = await health();
  if (state === "ready") {
    try {
      chat.model = await modelName(settings.key);
      byId("model").textContent = chat.model;
    } catch (error) {
      state = error instanceof ApiError && error.status === 401 ? "key required" : "unreachable";
    }
  }
  byId("server").dataset.state = state;
  byId("state").textContent = state;
  if (state !== "ready" && state !== "key required") retry = setTimeout(connect, RETRY_MS);
}

function showState() {
  const { isRunning } = chat;
  const hadFocus = document.activeElement === send;
  send.dataset.action = isRunning ? "stop" : "send";
  send.textContent = isRunning ? "Stop" : "Send";
  send.disabled = !isRunning && prompt.value.trim() === "";
  if (hadFocus && send.disabled) prompt.focus();
  const last = chat.exchanges.at(-1);
  if (last?.end === "failed" && last !== checked) {
    checked = last; // once for each failure, not with every key
    connect();
  }
}

function announce(text) {
  byId("status").textContent = text;
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, 200)}px`;
}

async function submit(text) {
  if (chat.isRunning || !text.trim()) return;
  prompt.value = "";
  grow();
  if (!chat.model) await connect();
  await chat.ask(text);
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.isRunning) chat.stop();
  else submit(prompt.value);
});
prompt.addEventListener("keydown", (event) => {
  // Safari reports the Enter that confirms a composition afterwards, with the code 229.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  submit(prompt.value);
});
prompt.addEventListener("input", () => {
  grow();
  showState();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.isRunning && !settings.dialog.open) chat.stop();
});
byId("new-chat").addEventListener("click", () => {
  chat.clear();
  showState();
  announce("New chat.");
  prompt.focus();
});
byId("measure").addEventListener("click", () => chat.measureAgain());
byId("show-insight").addEventListener("click", () => {
  const isShown = document.body.classList.toggle("shows-insight");
  byId("show-insight").setAttribute("aria-expanded", String(isShown));
  byId("show-insight").textContent = isShown ? "Chat" : "Insight";
  if (isShown) byId("insight").scrollTop = 0;
});
addEventListener("pagehide", () => chat.stop()); // frees the server's place
addEventListener("pageshow", (event) => event.persisted && connect());

installTips((element) => {
  const described = element.closest?.("[data-tip]");
  if (described) return described.dataset.tip;
  const span = element.closest?.(".token[data-number]");
  const answer = span && chat.exchanges.find((own) => own.answer.element.contains(span))?.answer;
  return answer ? answer.describe(Number(span.dataset.number)) : null;
});

byId("examples").append(
  ...EXAMPLES.map((text) => {
    const item = make("li");
    item.append(make("button", "example", text, { type: "button", onclick: () => submit(text) }));
    return item;
  }),
);
prompt.value = "";
insight.refresh();
connect();
prompt.focus();
