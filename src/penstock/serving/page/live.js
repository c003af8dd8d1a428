// The status view: models, workers, queues, pages, latencies, servables and their processes. It is updated once a second while it is visible.

const SAMPLES = 120; // points of the graph
export const UPDATE_MS = 1000; // time between updates while the view is visible
const history = new Map(); // model id -> { at, tokens, rates }
const number = new Intl.NumberFormat("en");

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
  if (value < 0.9995) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 90 ? `${value.toFixed(1)} s` : `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
}

// Tokens per second since the last update. A restarted worker counts from 0 again.
function rateOf(model, now) {
  const known = history.get(model.id) ?? { at: now, tokens: model.num_output_tokens, rates: [] };
  if (now > known.at) {
    known.rates.push(Math.max(0, model.num_output_tokens - known.tokens) / ((now - known.at) / 1000));
    known.rates.splice(0, known.rates.length - SAMPLES);
  }
  known.at = now;
  known.tokens = model.num_output_tokens;
  history.set(model.id, known);
  return known.rates;
}

function graph(rates) {
  const most = Math.max(...rates, 1);
  const points = rates.map((rate, i) => `${SAMPLES - rates.length + i},${38 - (36 * rate) / most}`);
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 ${SAMPLES - 1} 40`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "graph");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(space, "path");
  if (points.length > 1) path.setAttribute("d", `M${points.join("L")}`);
  svg.append(path);
  const minutes = (SAMPLES * UPDATE_MS) / 60000;
  const words = `Tokens per second, last ${minutes} minutes (peak ${number.format(Math.round(Math.max(0, ...rates)))})`;
  return element("figure", {}, svg, element("figcaption", { class: "dim" }, words));
}

function figures(pairs) {
  const list = element("dl", { class: "figures" });
  for (const [name, ...value] of pairs) list.append(element("div", {}, element("dt", {}, name), element("dd", {}, ...value)));
  return list;
}

function pages(model) {
  if (!model.num_pages) return ["\u2013"];
  const words = `${number.format(model.num_held_pages)} of ${number.format(model.num_pages)}`;
  const bar = element("meter", { min: 0, max: model.num_pages, value: model.num_held_pages, "aria-label": "Pages in use" });
  bar.textContent = words;
  return [words, bar];
}

function table(caption, heads, rows) {
  const head = element("tr", {}, ...heads.map((name) => element("th", { scope: "col" }, name)));
  const lines = rows.map(([first, ...rest]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...rest.map((cell) => element("td", {}, cell))),
  );
  const made = element("table", {}, element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...lines));
  return element("div", { class: "scroll" }, made);
}

function latencies({ latency, window }) {
  const rows = [
    ["time to first token", latency?.first_token_s],
    ["inter-token latency", latency?.between_tokens_s],
    ["end to end", latency?.e2e_s],
  ].filter(([, value]) => value);
  if (!rows.length) return "";
  return table(window ? `Latency over ${window}` : "Latency", ["", "p50", "p99"], rows.map(([name, { p50, p99 }]) => [name, seconds(p50), seconds(p99)]));
}

function card(model, now) {
  const rates = rateOf(model, now);
  const share = model.num_prompt_tokens ? `${((100 * model.num_cached_tokens) / model.num_prompt_tokens).toFixed(0)} %` : "\u2013";
  const title = element("h2", {}, model.id, element("span", { class: `state ${model.state}` }, model.state));
  const about = [model.network, model.scheme, model.max_model_len && `${number.format(model.max_model_len)} tokens`, model.source];
  const made = element("section", { class: "card", "aria-label": model.id }, title);
  made.append(element("p", { class: "dim" }, about.filter(Boolean).join(" \u00b7 ")));
  if (model.error) made.append(element("p", { class: "error" }, model.error));
  made.append(
    figures([
      ["Running", number.format(model.num_running)],
      ["Waiting", number.format(model.num_waiting)],
      ["Tokens/s", number.format(Math.round(rates.at(-1) ?? 0))],
      ["Generated tokens", number.format(model.num_output_tokens)],
      ["Prefix cache hits", share],
      ["Preemptions", number.format(model.num_preemptions)],
      ["Pages in use", ...pages(model)],
    ]),
    graph(rates),
    latencies(model),
  );
  if (model.workers?.length) {
    const rows = model.workers.map((worker) => [
      worker.name, worker.status, String(worker.pid || "\u2013"), String(worker.version), String(worker.num_open), seconds(worker.heartbeat_age_s),
    ]);
    made.append(table("Workers", ["name", "state", "PID", "weights version", "requests", "last heartbeat"], rows));
  }
  return made;
}

const mean = (sum, count) => (count ? seconds(sum / count) : "\u2013");

function servableCard({ name, labels, versions }) {
  const states = versions.map(({ state }) => state);
  const state = states.includes("READY") ? "ready" : (states[0] ?? "no versions").toLowerCase();
  const made = element("section", { class: "card", "aria-label": name }, element("h2", {}, name, element("span", { class: `state ${state}` }, state)));
  const named = Object.entries(labels).map(([label, version]) => `${label}: version ${version}`);
  if (named.length) made.append(element("p", { class: "dim" }, named.join(" \u00b7 ")));
  for (const { reason } of versions) if (reason) made.append(element("p", { class: "error" }, reason));
  const methods = versions.flatMap(({ version, methods }) =>
    methods.map((one) => [
      one.name, version, number.format(one.num_success), number.format(one.num_fail + one.num_rejected), number.format(one.num_instances),
      one.num_batches ? (one.num_batched / one.num_batches).toFixed(1) : "\u2013", mean(one.queue_s, one.num_success), mean(one.compute_s, one.num_success),
    ]),
  );
  if (methods.length) made.append(table("Methods", ["name", "version", "succeeded", "failed", "instances", "mean batch size", "mean queue time", "mean run time"], methods));
  const processes = versions.flatMap(({ version, processes }) =>
    processes.map(({ pid, runs, status, num_open }) => [runs, version, status, String(pid), String(num_open)]),
  );
  if (processes.length) made.append(table("Processes", ["stage or model", "version", "state", "PID", "requests"], processes));
  return made;
}

const isRead = (place) => !getSelection().isCollapsed && place.contains(getSelection().anchorNode);

export function showLive(status) {
  const place = document.getElementById("models");
  if (isRead(place)) return; // do not replace text while the user selects it
  const now = performance.now();
  const words = [`Penstock ${status.version}`, `uptime ${seconds(status.uptime_s)}`];
  if (status.is_draining) words.push("stopping: no new requests are accepted");
  document.getElementById("service").textContent = words.join(" \u00b7 ");
  place.replaceChildren(...status.models.map((model) => card(model, now)), ...status.servables.map(servableCard));
}
