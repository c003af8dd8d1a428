// The methods of servables: the selected method's inputs, a field to edit them, and the outputs.

import { getMethod, infer } from "./service.js";

const field = (id) => document.getElementById(id);
const written = new Map(); // key -> the inputs that the user has written
let known = ""; // the methods in the list
let current = null; // { key, name, version, inputs, outputs }
let running = null;

const keyOf = (name, version) => `${name} ${version}`;

export function methodsOf(status) {
  const ready = status.servables.flatMap(({ versions }) => versions.filter(({ is_ready }) => is_ready));
  return ready.flatMap(({ version, methods }) => methods.map(({ name }) => ({ name, version })));
}

// Returns an example: one instance of zeros.
function example(datatype, [size, ...rest]) {
  if (size === undefined) return datatype === "BYTES" ? "text" : datatype === "BOOL" ? false : 0;
  return Array.from({ length: size < 0 ? 1 : size }, () => example(datatype, rest));
}

const described = ({ name, datatype, shape }) => `${name} ${datatype}[${shape.join(", ").replace("-1", "n")}]`;

function shapeOf(data) {
  const shape = [];
  for (let at = data; Array.isArray(at); at = at[0]) shape.push(at.length);
  return shape;
}

function show(words, isWrong) {
  const place = field("method-answer");
  place.textContent = words;
  place.classList.toggle("error", isWrong);
}

async function choose() {
  const [name, version] = field("method").value.split(" ");
  const key = keyOf(name, version);
  current = null;
  field("method-run").disabled = true;
  show("", false);
  field("method-time").textContent = "";
  if (!name) return;
  try {
    const found = await getMethod(name, version);
    if (field("method").value !== key) return; // another method was chosen in the meantime
    current = { key, name, version, inputs: found.inputs };
    field("method-takes").textContent = `Inputs: ${found.inputs.map(described).join(", ")}. Outputs: ${found.outputs.map(described).join(", ")}.`;
    const zeros = found.inputs.map((one) => `  ${JSON.stringify(one.name)}: ${JSON.stringify([example(one.datatype, one.shape.slice(1))])}`);
    field("method-inputs").value = written.get(key) ?? `{\n${zeros.join(",\n")}\n}`;
    field("method-run").disabled = false;
  } catch (error) {
    show(error.message, true);
  }
}

// The list is only replaced if it has changed.
export function setMethods(methods) {
  const names = methods.map(({ name, version }) => keyOf(name, version));
  if (names.join("\n") === known) return;
  known = names.join("\n");
  const select = field("method");
  const before = select.value;
  const several = new Set(methods.map(({ version }) => version)).size > 1;
  select.replaceChildren(...methods.map(({ name, version }) => new Option(several ? `${name}, version ${version}` : name, keyOf(name, version))));
  if (names.includes(before)) select.value = before;
  else void choose();
}

async function run(event) {
  event.preventDefault();
  if (!current || running) return;
  let given;
  try {
    given = JSON.parse(field("method-inputs").value);
  } catch (error) {
    show(`Invalid JSON: ${error.message}`, true);
    return;
  }
  const inputs = Object.entries(given ?? {}).map(([name, data]) => {
    const datatype = current.inputs.find((one) => one.name === name)?.datatype ?? "FP32";
    return { name, datatype, shape: shapeOf(data), data };
  });
  running = new AbortController();
  field("method-run").disabled = true;
  field("method-stop").hidden = false;
  const start = performance.now();
  try {
    const { outputs } = await infer(current, inputs, running.signal);
    field("method-time").textContent = `${(performance.now() - start).toFixed(1)} ms`;
    show(outputs.map(({ name, datatype, shape, data }) => `${name} ${datatype}[${shape.join(", ")}]: ${JSON.stringify(data)}`).join("\n"), false);
  } catch (error) {
    field("method-time").textContent = "";
    show(error.name === "AbortError" ? "Stopped." : error.message, true);
  }
  running = null;
  field("method-run").disabled = current === null;
  field("method-stop").hidden = true;
}

export function startMethods() {
  field("method").addEventListener("change", () => void choose());
  field("method-inputs").addEventListener("input", () => current && written.set(current.key, field("method-inputs").value));
  field("method-form").addEventListener("submit", (event) => void run(event));
  field("method-stop").addEventListener("click", () => running?.abort());
}
