// What goes over the wire: names, and answers as streams of server-sent events.

const STORED_KEY = "offload-decode key";

/** An error that the server told in OpenAI's shape, or that kept it from telling one. */
export class Refused extends Error {
  constructor(message, status = 0, code = null, retrySeconds = 0) {
    super(sentence(message));
    this.status = status;
    this.code = code;
    this.retrySeconds = retrySeconds;
  }
}

export function keepKey(key) {
  sessionStorage.setItem(STORED_KEY, key);
}

/** Every name that can be asked: stores first. */
export async function models() {
  const response = await send("/v1/models");
  const { data } = await response.json();
  return data.sort((one, other) => !one.parent - !other.parent || one.id.localeCompare(other.id));
}

/** Stores that are made, with how far that is. */
export async function jobs() {
  const response = await send("/v1/jobs");
  return (await response.json()).data;
}

/** The chunks of an answer, parsed, as they come. */
export async function* chat(asked, signal) {
  const response = await send("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...asked, stream: true, stream_options: { include_usage: true }, citations: true }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message, response.status, chunk.error.code);
    yield chunk;
  }
  throw new Refused("The server ended the answer before it was whole");
}

async function send(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = sessionStorage.getItem(STORED_KEY);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server cannot be reached: is it still running?");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new Refused(
    told?.error?.message ?? `The server answered with status ${response.status}`,
    response.status,
    told?.error?.code,
    Number(response.headers.get("Retry-After")),
  );
}

async function* events(body) {
  let rest = "";
  for await (const text of pieces(body)) {
    const lines = (rest + text).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}

async function* pieces(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new Refused("The connection broke off before the answer was whole");
    });
    if (done) return;
    yield value;
  }
}

function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}
