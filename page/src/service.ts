// The API client of the page: requests with the key, errors with their messages, streamed answers.

import { isAbort } from "./dom";

export interface Percentiles {
  p50: number;
  p99: number;
}

export interface Worker {
  name: string;
  status: string;
  pid: number;
  version: number;
  heartbeat_age_s: number | null;
  num_open: number;
}

export interface Model {
  id: string;
  state: string;
  error: string;
  network?: string;
  scheme?: string;
  source?: string;
  max_model_len?: number;
  has_chat_template?: boolean;
  chat_features?: string[]; // what the chat template offers: tools, thoughts, enable_thinking, thinking, reasoning_effort
  num_running: number;
  num_waiting: number;
  num_pages: number;
  num_held_pages: number;
  num_prompt_tokens: number;
  num_cached_tokens: number;
  num_output_tokens: number;
  num_finished: Record<string, number>; // requests by reason
  num_preemptions: number;
  window: string;
  latency: Record<"first_token_s" | "between_tokens_s" | "e2e_s", Percentiles | null>;
  workers: Worker[];
}

export interface MethodStatus {
  name: string;
  num_success: number;
  num_fail: number;
  num_rejected: number;
  num_instances: number;
  num_batches: number;
  num_batched: number;
  queue_s: number;
  compute_s: number;
}

export interface Servable {
  name: string;
  labels: Record<string, number>;
  versions: {
    version: string;
    state: string;
    reason: string;
    is_ready: boolean;
    methods: MethodStatus[];
    processes: { pid: number; runs: string; status: string; num_open: number }[];
  }[];
}

export interface Status {
  version: string;
  uptime_s: number;
  is_draining: boolean;
  models: Model[];
  servables: Servable[];
}

export interface TensorSpec {
  name: string;
  datatype: string;
  shape: number[];
}

export interface ToolCall {
  id: string;
  type: string;
  function: { name: string; arguments: string };
}

export interface Message {
  role: "system" | "user" | "assistant" | "tool";
  content: string;
  reasoning_content?: string;
  tool_calls?: ToolCall[];
  tool_call_id?: string;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number } | null;
}

interface ToolCallDelta {
  index: number;
  id?: string;
  function?: { name?: string; arguments?: string };
}

export interface Delta {
  text: string;
  thoughts: string;
  finish: string | null;
  usage: Usage | null;
  calls: ToolCallDelta[];
}

export type Settings = Record<string, unknown>; // fields of a request

export class ServiceError extends Error {
  constructor(
    message: string,
    readonly status = 0,
  ) {
    super(message);
  }
}

type AskForKey = (isWrong: boolean) => Promise<string | null>;
let askForKey: AskForKey = async () => null;

// `ask` asks the user for a key and resolves to null if the user cancels.
export function onKeyWanted(ask: AskForKey): void {
  askForKey = ask;
}

const KEY = "penstock-key";

// The key is stored in this tab only; without session storage, in this page only.
let ownKey: string | null = null;
export function key(): string | null {
  try {
    return sessionStorage.getItem(KEY) ?? ownKey;
  } catch {
    return ownKey;
  }
}

function keepKey(value: string): void {
  ownKey = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // it is stored in ownKey
  }
}

async function errorOf(response: Response): Promise<ServiceError> {
  let message = `${response.status} ${response.statusText}`.trim();
  try {
    const { error } = await response.json();
    message = (typeof error === "string" ? error : error.message) || message; // /v2 returns a string
  } catch {
    // no error object: use the status line
  }
  return new ServiceError(message, response.status);
}

let asking: Promise<string | null> | null = null;

// Asks once for all requests that wait for the key.
function newKey(isWrong: boolean): Promise<string | null> {
  asking ??= askForKey(isWrong).finally(() => (asking = null));
  return asking;
}

async function request(path: string, options: RequestInit = {}): Promise<Response> {
  for (;;) {
    const headers = new Headers(options.headers);
    const used = key();
    if (used) headers.set("Authorization", `Bearer ${used}`);
    let response: Response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (isAbort(error)) throw error;
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

function postJson(path: string, body: unknown, signal: AbortSignal): Promise<Response> {
  return request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
}

export const getStatus = async (): Promise<Status> => (await request("status")).json();

// Means over equal intervals; `at_s` has their ends in seconds of the service's uptime.
export interface ModelHistory {
  at_s: number[];
  output_tokens_per_s: number[];
  finished_per_s: number[];
  prompt_tokens_per_s: number[];
  num_running: number[];
  num_waiting: number[];
  held_pages_share: number[];
}

export const getHistory = async (): Promise<{ uptime_s: number; models: Record<string, ModelHistory> }> => (await request("status/history")).json();

// The OpenAPI description, as far as the page reads it.
export interface Description {
  components: { schemas: Record<string, { properties?: Record<string, unknown> }> };
}

export const getDescription = async (): Promise<Description> => (await request("openapi.json")).json();

const pathOf = (name: string, version: string): string => `v2/models/${encodeURIComponent(name)}/versions/${encodeURIComponent(version)}`;

export async function getMethod(name: string, version: string): Promise<{ inputs: TensorSpec[]; outputs: TensorSpec[] }> {
  return (await request(pathOf(name, version))).json();
}

// Sends the body of an inference: JSON, followed by the bytes of binary tensors. Returns the same two parts of the response.
export async function infer(name: string, version: string, json: string, binary: Blob, signal: AbortSignal): Promise<[string, ArrayBuffer]> {
  const head = new TextEncoder().encode(json);
  const headers = { "Content-Type": "application/octet-stream", "Inference-Header-Content-Length": String(head.length) };
  const response = await request(`${pathOf(name, version)}/infer`, { method: "POST", headers, body: new Blob([head, binary]), signal });
  const data = await response.arrayBuffer();
  const length = Number(response.headers.get("Inference-Header-Content-Length") ?? data.byteLength);
  return [new TextDecoder().decode(data.slice(0, length)), data.slice(length)];
}

async function tokenize(body: Settings, signal: AbortSignal): Promise<number[]> {
  return (await (await postJson("tokenize", body, signal)).json()).tokens;
}

// Yields the parsed data of each event until [DONE]. A stream that ends earlier is an error.
async function* eventsOf(body: ReadableStream<Uint8Array<ArrayBuffer>>): AsyncGenerator<any> {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ServiceError("The connection closed before the response was complete.");
      const events = (rest + value).split(/\r?\n\r?\n/);
      rest = events.pop() ?? "";
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

export interface Asked {
  model: string;
  settings: Settings;
  messages?: Message[]; // a conversation; without it, `begun` is a text to continue
  begun: string; // the beginning of the answer, which the model continues
  thoughts: string; // before that beginning
}

// Asks for an answer, or for what follows the beginning of one.
async function post({ model, messages, begun, thoughts, settings }: Asked, signal: AbortSignal): Promise<Response> {
  const stream = { stream: true, stream_options: { include_usage: true } };
  const { response_format, tools, tool_choice, chat_template_kwargs, reasoning_effort, ...sampling } = settings; // some are fields of conversations only
  const { response_format: _, ...chat } = settings;
  if (messages && !begun && !thoughts) return postJson("v1/chat/completions", { model, messages, ...settings, ...stream }, signal);
  if (messages && thoughts) {
    // Only the chat template knows how thoughts are written.
    const last: Message = { role: "assistant", content: begun, reasoning_content: thoughts };
    const goOn = { continue_final_message: true, add_generation_prompt: false };
    return postJson("v1/chat/completions", { model, messages: [...messages, last], ...chat, ...goOn, ...stream }, signal);
  }
  // An answer is continued as a completion of the tokens of the conversation and of its beginning.
  const rendered = { ...(tools ? { tools } : {}), ...(chat_template_kwargs ? { chat_template_kwargs } : {}) };
  const prompt = messages
    ? [...(await tokenize({ model, messages, ...rendered }, signal)), ...(await tokenize({ model, prompt: begun, add_special_tokens: false }, signal))]
    : begun;
  return postJson("v1/completions", { model, prompt, ...sampling, ...stream }, signal);
}

// Yields the deltas of an answer.
export async function* answer(asked: Asked, signal: AbortSignal): AsyncGenerator<Delta> {
  const response = await post(asked, signal);
  for await (const event of eventsOf(response.body!)) {
    if (event.error) throw new ServiceError(event.error.message, event.error.code);
    const choice = event.choices?.[0];
    yield {
      text: choice?.delta?.content ?? choice?.text ?? "",
      thoughts: choice?.delta?.reasoning_content ?? "",
      finish: choice?.finish_reason ?? null,
      usage: event.usage ?? null,
      calls: choice?.delta?.tool_calls ?? [],
    };
  }
}
