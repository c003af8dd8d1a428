// The API client of the page: requests with the key, errors with their messages, streamed answers.

export class ServiceError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let askForKey = async () => null;

// `ask(wrong)` asks the user for a key and resolves to null if the user cancels.
export function onKeyWanted(ask) {
  askForKey = ask;
}

const KEY = "penstock-key";

// The key is stored in this tab only; without session storage, in this page only.
let ownKey = null;
const key = () => {
  try {
    return sessionStorage.getItem(KEY) ?? ownKey;
  } catch {
    return ownKey;
  }
};

function keepKey(value) {
  ownKey = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // it is stored in ownKey
  }
}

async function errorOf(response) {
  let message = `${response.status} ${response.statusText}`.trim();
  try {
    const { error } = await response.json();
    message = (typeof error === "string" ? error : error.message) || message; // /v2 returns a string
  } catch {
    // no error object: use the status line
  }
  return new ServiceError(message, response.status);
}

let asking = null;

// Asks once for all requests that wait for the key.
function newKey(wrong) {
  asking ??= askForKey(wrong).finally(() => (asking = null));
  return asking;
}

async function request(path, options = {}) {
  for (;;) {
    const headers = { ...options.headers };
    const used = key();
    if (used) headers.Authorization = `Bearer ${used}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServiceError("The server does not respond.");
    }
    if (response.ok) return response;
    if (response.status !== 401) throw await errorOf(response);
    if (key() !== used) continue; // another request got a new key in the meantime
    const given = await newKey(Boolean(used));
    if (given === null) throw new ServiceError("API key required.", 401);
    keepKey(given);
  }
}

export async function getStatus() {
  return (await request("status")).json();
}

const ofMethod = (name, version) => `v2/models/${encodeURIComponent(name)}/versions/${encodeURIComponent(version)}`;

export async function getMethod(name, version) {
  return (await request(ofMethod(name, version))).json();
}

export async function infer({ name, version }, inputs, signal) {
  const headers = { "Content-Type": "application/json" };
  const body = JSON.stringify({ inputs });
  return (await request(`${ofMethod(name, version)}/infer`, { method: "POST", headers, body, signal })).json();
}

// Yields the parsed data of each event until [DONE]. A stream that ends earlier is an error.
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ServiceError("The connection closed before the response was complete.");
      const events = (rest + value).split(/\r?\n\r?\n/);
      rest = events.pop();
      for (const event of events) {
        const data = event
          .split(/\r?\n/)
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart())
          .join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Yields deltas { text, finish, usage } of an answer to `messages` or to a plain `prompt`.
export async function* answer({ model, messages, prompt, settings, signal }) {
  const path = messages ? "v1/chat/completions" : "v1/completions";
  const asked = messages ? { messages } : { prompt };
  const body = { model, ...asked, ...settings, stream: true, stream_options: { include_usage: true } };
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const event of eventsOf(response.body)) {
    if (event.error) throw new ServiceError(event.error.message, event.error.code);
    const choice = event.choices?.[0];
    yield {
      text: (messages ? choice?.delta?.content : choice?.text) ?? "",
      finish: choice?.finish_reason ?? null,
      usage: event.usage ?? null,
    };
  }
}
