// The status view: models, workers, queues, pages, latencies, servables and their processes. It is updated once a second while it is visible.

import type { Chart } from "./charts";
import { type Child, field, make } from "./dom";
import { number, rate, seconds } from "./figures";
import { type MethodStatus, type Model, type Servable, type Status, getHistory } from "./service";

export const UPDATE_MS = 1000; // time between updates while the view is visible
const MAX_SAMPLES = 7200;

// What is known of a model: times in seconds, and the values at these times.
interface History {
  at: number[];
  output: number[];
  prompt: number[];
  finished: number[];
  running: number[];
  waiting: number[];
  pages: number[];
  last: Model;
}

const histories = new Map<string, History>();

const finishedOf = (model: Model): number => Object.values(model.num_finished).reduce((sum, count) => sum + count, 0);

// Adds a sample. Rates are those since the sample before, the first since the service started; a restarted worker counts from 0 again.
export function record(status: Status): void {
  const now = Date.now() / 1000;
  for (const model of status.models) {
    const known = histories.get(model.id);
    if (!known) {
      const mean = (count: number): number => (status.uptime_s > 0 ? count / status.uptime_s : 0);
      histories.set(model.id, {
        at: [now], output: [mean(model.num_output_tokens)], prompt: [mean(model.num_prompt_tokens)], finished: [mean(finishedOf(model))],
        running: [model.num_running], waiting: [model.num_waiting], pages: [shareOf(model)], last: model,
      });
      continue;
    }
    const elapsed = now - known.at.at(-1)!;
    if (elapsed <= 0) continue;
    const rate = (name: "num_output_tokens" | "num_prompt_tokens"): number => Math.max(0, model[name] - known.last[name]) / elapsed;
    known.at.push(now);
    known.output.push(rate("num_output_tokens"));
    known.prompt.push(rate("num_prompt_tokens"));
    known.finished.push(Math.max(0, finishedOf(model) - finishedOf(known.last)) / elapsed);
    known.running.push(model.num_running);
    known.waiting.push(model.num_waiting);
    known.pages.push(shareOf(model));
    known.last = model;
    for (const values of [known.at, known.output, known.prompt, known.finished, known.running, known.waiting, known.pages]) values.splice(0, values.length - MAX_SAMPLES);
  }
}

// Puts the service's own history before what the page has seen.
async function loadHistory(): Promise<void> {
  const { uptime_s, models } = await getHistory();
  const start = Date.now() / 1000 - uptime_s;
  for (const [id, past] of Object.entries(models)) {
    const known = histories.get(id);
    if (!known) continue;
    const first = known.at[0]!;
    const at = past.at_s.map((seconds) => start + seconds);
    const count = at.filter((time) => time < first).length;
    known.at.unshift(...at.slice(0, count));
    known.output.unshift(...past.output_tokens_per_s.slice(0, count));
    known.prompt.unshift(...past.prompt_tokens_per_s.slice(0, count));
    known.finished.unshift(...past.finished_per_s.slice(0, count));
    known.running.unshift(...past.num_running.slice(0, count));
    known.waiting.unshift(...past.num_waiting.slice(0, count));
    known.pages.unshift(...past.held_pages_share.slice(0, count).map((share) => 100 * share));
  }
}

const RECENT_S = 10;

// The mean of a rate over the last seconds: between two short requests, that since the last sample is often 0.
function recent({ at }: History, rates: number[]): number {
  const end = at.at(-1)!;
  let [sum, time] = [0, 0];
  for (let i = at.length - 1; i > 0 && (time === 0 || end - at[i]! < RECENT_S); i--) {
    sum += rates[i]! * (at[i]! - at[i - 1]!);
    time += at[i]! - at[i - 1]!;
  }
  return time > 0 ? sum / time : rates.at(-1)!;
}

let past: Promise<void> | null = null;

// Loads the history once; it is asked for again if that failed.
export const knowPast = (): Promise<void> => (past ??= loadHistory().catch(() => void (past = null)));

const shareOf = (model: Model): number => (model.num_pages ? (100 * model.num_held_pages) / model.num_pages : 0);

function figures(pairs: [string, ...Child[]][]): HTMLElement {
  return make("dl", { class: "figures" }, ...pairs.map(([name, ...value]) => make("div", {}, make("dt", {}, name), make("dd", {}, ...value))));
}

function pages(model: Model): Child[] {
  if (!model.num_pages) return ["\u2013"];
  const words = `${number(model.num_held_pages)} of ${number(model.num_pages)}`;
  return [words, make("meter", { min: 0, max: model.num_pages, value: model.num_held_pages, "aria-label": "Pages in use" }, words)];
}

// A table whose rows become blocks on a narrow screen; the roles stay those of a table.
function table(caption: string, heads: string[], rows: string[][]): HTMLElement {
  const head = make("tr", { role: "row" }, ...heads.map((name) => make("th", { scope: "col", role: "columnheader" }, name)));
  const lines = rows.map(([first = "", ...rest]) =>
    make(
      "tr",
      { role: "row" },
      make("th", { scope: "row", role: "rowheader" }, first),
      ...rest.map((cell, at) => make("td", { role: "cell", "data-label": heads[at + 1] ?? "" }, cell)),
    ),
  );
  const [top, body] = [make("thead", { role: "rowgroup" }, head), make("tbody", { role: "rowgroup" }, ...lines)];
  return make("table", { class: "stacks", role: "table" }, make("caption", {}, caption), top, body);
}

function latencies({ latency, window }: Model): Child[] {
  const rows = ([
    ["time to first token", latency.first_token_s],
    ["inter-token latency", latency.between_tokens_s],
    ["end to end", latency.e2e_s],
  ] as const).flatMap(([name, value]) => (value ? [[name, seconds(value.p50), seconds(value.p99)]] : []));
  return rows.length ? [table(`Latency over ${window}`, ["", "p50", "p99"], rows)] : [];
}

function workers(model: Model): Child[] {
  const rows = model.workers.map((worker) => [
    worker.name, worker.status, String(worker.pid || "\u2013"), String(worker.version), String(worker.num_open), seconds(worker.heartbeat_age_s),
  ]);
  return rows.length ? [table("Workers", ["name", "state", "PID", "weights version", "requests", "last heartbeat"], rows)] : [];
}

const heading = (name: string, state: string): HTMLElement => make("h2", {}, name, make("span", { class: `state ${state}` }, state));

let library: typeof import("./charts.js") | null = null;

type Drawn = [Chart, (history: History) => number[][]][]; // each chart, and its data

// The card of a model. Its charts stay when the figures change.
class ModelCard {
  readonly element: HTMLElement;
  #top = make("div");
  #charts = make("div", { class: "charts" });
  #note = make("p", { class: "dim" });
  #bottom = make("div");
  #drawn: Drawn = [];

  constructor(id: string) {
    this.element = make("section", { class: "card", "aria-label": id }, this.#top, this.#charts, this.#note, this.#bottom);
  }

  #draw({ Chart }: typeof import("./charts.js")): void {
    const whole = (value: number): string => number(Math.round(value));
    const rateOrWhole = (value: number): string => (Number.isInteger(value) ? number(value) : rate(value));
    const charts: Drawn = [
      [new Chart({ title: "Tokens per second", series: [{ label: "generated", color: "--accent" }, { label: "prompt", color: "--second" }], text: rate }), ({ at, output, prompt }) => [at, output, prompt]],
      [new Chart({ title: "Requests", series: [{ label: "running", color: "--accent" }, { label: "waiting", color: "--second" }, { label: "finished per second", color: "--good" }], text: rateOrWhole }), ({ at, running, waiting, finished }) => [at, running, waiting, finished]],
      [new Chart({ title: "KV cache pages in use (%)", series: [{ label: "in use", color: "--accent" }], most: 100, text: whole }), ({ at, pages: share }) => [at, share]],
    ];
    this.#drawn = charts;
    this.#charts.replaceChildren(...charts.map(([chart]) => chart.figure));
  }

  redraw(): void {
    for (const [chart] of this.#drawn) chart.redraw();
  }

  show(model: Model, uptime_s: number): void {
    const history = histories.get(model.id)!;
    const share = model.num_prompt_tokens ? `${((100 * model.num_cached_tokens) / model.num_prompt_tokens).toFixed(0)} %` : "\u2013";
    const about = [model.network, model.scheme, model.max_model_len && `${number(model.max_model_len)} tokens`, model.source];
    this.#top.replaceChildren(
      heading(model.id, model.state),
      make("p", { class: "dim" }, about.filter(Boolean).join(" \u00b7 ")),
      ...(model.error ? [make("p", { class: "error" }, model.error)] : []),
      figures([
        ["Running", number(model.num_running)],
        ["Waiting", number(model.num_waiting)],
        ["Requests finished", number(finishedOf(model))],
        [`Tokens/s, last ${RECENT_S} s`, rate(recent(history, history.output))],
        ["Generated tokens", number(model.num_output_tokens)],
        ["Prompt tokens", number(model.num_prompt_tokens)],
        ["Prefix cache hits", share],
        ["Preemptions", number(model.num_preemptions)],
        ["Pages in use", ...pages(model)],
      ]),
    );
    if (library && !this.#drawn.length) this.#draw(library);
    for (const [chart, data] of this.#drawn) chart.show(data(history));
    const mean = uptime_s > 0 ? model.num_output_tokens / uptime_s : 0;
    const since = seconds(Date.now() / 1000 - history.at[0]!);
    this.#note.textContent = `The charts begin ${since} ago. Mean since the service started: ${number(Number(mean.toFixed(1)))} generated tokens/s.`;
    this.#bottom.replaceChildren(...latencies(model), ...workers(model));
  }
}

const mean = (sum: number, count: number): string => (count ? seconds(sum / count) : "\u2013");

function methodRow(one: MethodStatus, version: string): string[] {
  return [
    one.name, version, number(one.num_success), number(one.num_fail + one.num_rejected), number(one.num_instances),
    one.num_batches ? (one.num_batched / one.num_batches).toFixed(1) : "\u2013", mean(one.queue_s, one.num_success), mean(one.compute_s, one.num_success),
  ];
}

function servableCard({ name, labels, versions }: Servable): HTMLElement {
  const states = versions.map(({ state }) => state);
  const state = states.includes("READY") ? "ready" : (states[0] ?? "no versions").toLowerCase();
  const card = make("section", { class: "card", "aria-label": name }, heading(name, state));
  const named = Object.entries(labels).map(([label, version]) => `${label}: version ${version}`);
  if (named.length) card.append(make("p", { class: "dim" }, named.join(" \u00b7 ")));
  for (const { reason } of versions) if (reason) card.append(make("p", { class: "error" }, reason));
  const methods = versions.flatMap((one) => one.methods.map((method) => methodRow(method, one.version)));
  if (methods.length) card.append(table("Methods", ["name", "version", "succeeded", "failed", "instances", "mean batch size", "mean queue time", "mean run time"], methods));
  const processes = versions.flatMap((one) => one.processes.map(({ pid, runs, status, num_open }) => [runs, one.version, status, String(pid), String(num_open)]));
  if (processes.length) card.append(table("Processes", ["stage or model", "version", "state", "PID", "requests"], processes));
  return card;
}

const cards = new Map<string, ModelCard>();

export function redrawCharts(): void {
  for (const card of cards.values()) card.redraw();
}

function isRead(place: HTMLElement): boolean {
  const selection = getSelection();
  return selection !== null && !selection.isCollapsed && place.contains(selection.anchorNode);
}

let wanted: Promise<void> | null = null;

export function showLive(status: Status): void {
  wanted ??= import("./charts.js").then((module) => void (library = module)).catch(() => void (wanted = null));
  const place = field("models");
  if (isRead(place)) return; // do not replace text while the user selects it
  const words = [`Penstock ${status.version}`, `uptime ${seconds(status.uptime_s)}`];
  if (status.is_draining) words.push("stopping: no new requests are accepted");
  field("service").textContent = words.join(" \u00b7 ");
  for (const id of cards.keys()) if (!status.models.some((model) => model.id === id)) cards.delete(id);
  for (const { id } of status.models) if (!cards.has(id)) cards.set(id, new ModelCard(id));
  const elements = [...status.models.map(({ id }) => cards.get(id)!.element), ...status.servables.map(servableCard)];
  const known = [...place.children];
  if (elements.length !== known.length || elements.some((element, at) => element !== known[at])) place.replaceChildren(...elements);
  for (const model of status.models) cards.get(model.id)!.show(model, status.uptime_s);
}
