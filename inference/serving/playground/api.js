// Requests to the server that has delivered this page.

import { events } from "./sse.js";

const ROOT = new URL("../", import.meta.url);
const GONE = "The server cannot be reached";
const CUT = "The connection was lost before the answer was complete";

/** An error with a remedy for the user; `status` is 0 if there was no response. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    const { text, remedy } = parts(message);
    super(text);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
    this.remedy = remedy;
  }
}

/** Splits an error message of the server: "problem; expected: A; got: B; remedy: C". */
export function parts(message) {
  const [problem, ...rest] = message.split(/; (?=(?:expected|got|remedy): )/);
  const of = (name) => rest.find((part) => part.startsWith(`${name}: `))?.slice(name.length + 2);
  const facts = ["expected", "got"].filter(of).map((name) => `${name} ${of(name)}`);
  const sentence = problem.charAt(0).toUpperCase() + problem.slice(1);
  const text = facts.length ? `${sentence} (${facts.join(", ")})` : sentence;
  return { text, remedy: of("remedy") ?? null };
}

/** Returns the state of the server: ready, draining, dead, or unreachable. */
export async function health() {
  try {
    const response = await fetch(new URL("health", ROOT), { cache: "no-store" });
    return (await response.json()).status;
  } catch {
    return "unreachable";
  }
}

/** Returns the name of the model that is served. */
export async function modelName(key) {
  const response = await request("v1/models", { headers: authorization(key) });
  return (await response.json()).data[0].id;
}

/** Yields the chunks of a streamed answer. */
export async function* chat(body, key, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...authorization(key) },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, { status: 200, ...chunk.error });
      yield chunk;
    }
  } catch (error) {
    if (error instanceof TypeError) throw new ApiError(CUT, { code: "cut" });
    throw error;
  }
  throw new ApiError(CUT, { code: "cut" });
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(new URL(path, ROOT), { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(GONE, { code: "unreachable" });
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const seconds = Number(response.headers.get("retry-after"));
  const facts = { status: response.status, retryAfter: seconds > 0 ? seconds : null };
  try {
    const { error } = await response.json();
    return new ApiError(error.message, { ...facts, code: error.code });
  } catch {
    return new ApiError(`The server has answered with status ${response.status}`, facts);
  }
}

function authorization(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}
