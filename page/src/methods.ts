// The methods of servables: a form for the inputs of the selected method, or its inputs as JSON, and the outputs.

import { copyButton, field, input, isAbort, make, messageOf } from "./dom";
import { MethodForm } from "./method_form";
import { picturesOf } from "./pictures";
import { type Status, type TensorSpec, getMethod, infer } from "./service";
import { type Input, type Tensor, bodyOf, listOf, outputsOf, shapeOf } from "./tensors";

interface Method {
  name: string;
  version: string;
  inputs: TensorSpec[];
  form: MethodForm;
  json: string | null; // what the user has written
}

const MAX_VALUES_SHOWN = 1000;
const methods = new Map<string, Method>(); // with what the user has filled in
let known = ""; // the methods in the list
let current: Method | null = null;
let isForm = true;
let running: AbortController | null = null;

const keyOf = (name: string, version: string): string => `${name} ${version}`;

export function methodsOf(status: Status): { name: string; version: string }[] {
  const ready = status.servables.flatMap(({ versions }) => versions.filter(({ is_ready }) => is_ready));
  return ready.flatMap((one) => one.methods.map(({ name }) => ({ name, version: one.version })));
}

// Returns an example: one instance of zeros.
function example(datatype: string, [size, ...rest]: number[]): unknown {
  if (size === undefined) return datatype === "BYTES" ? "text" : datatype === "BOOL" ? false : 0;
  return Array.from({ length: size < 0 ? 1 : size }, () => example(datatype, rest));
}

const described = ({ name, datatype, shape }: TensorSpec): string => `${name} ${datatype}[${shape.join(", ").replace("-1", "n")}]`;

function showError(words: string): void {
  field("method-answer").replaceChildren(make("p", { class: "error" }, words));
}

// Returns the inputs of the form as JSON, if it can be read and has no files.
function jsonOf({ form, inputs }: Method): string {
  let values: [string, unknown][];
  try {
    values = form.inputs().map(({ name, data }) => [name, data]);
    if (values.some(([, data]) => (data as unknown[]).some((one) => one instanceof Uint8Array))) throw new Error("files have no JSON");
  } catch {
    values = inputs.map(({ name, datatype, shape }) => [name, [example(datatype, shape.slice(1))]]);
  }
  return `{\n${values.map(([name, data]) => `  ${JSON.stringify(name)}: ${JSON.stringify(data)}`).join(",\n")}\n}`;
}

function showInputs(): void {
  field("as-form").setAttribute("aria-pressed", String(isForm));
  field("as-json").setAttribute("aria-pressed", String(!isForm));
  field("method-fields").hidden = !isForm;
  field("method-json").hidden = isForm;
  if (!current) return;
  field("method-fields").replaceChildren(current.form.element);
  input("method-inputs").value = current.json ?? jsonOf(current);
}

async function choose(): Promise<void> {
  const [name = "", version = ""] = input("method").value.split(" ");
  const key = keyOf(name, version);
  current = null;
  input("method-run").disabled = true;
  field("method-answer").replaceChildren();
  field("method-time").textContent = "";
  if (!name) return;
  try {
    const { inputs, outputs } = await getMethod(name, version);
    if (input("method").value !== key) return; // another method was chosen in the meantime
    const before = methods.get(key);
    const isSame = before && JSON.stringify(before.inputs) === JSON.stringify(inputs);
    current = isSame ? before : { name, version, inputs, form: new MethodForm(inputs), json: null };
    methods.set(key, current);
    field("method-takes").textContent = `Inputs: ${inputs.map(described).join(", ")}. Outputs: ${outputs.map(described).join(", ")}.`;
    showInputs();
    input("method-run").disabled = false;
  } catch (error) {
    showError(messageOf(error));
  }
}

// The list is only replaced if it has changed.
export function setMethods(next: { name: string; version: string }[]): void {
  const names = next.map(({ name, version }) => keyOf(name, version));
  if (names.join("\n") === known) return;
  known = names.join("\n");
  const select = field<HTMLSelectElement>("method");
  const before = select.value;
  const isSeveral = new Set(next.map(({ version }) => version)).size > 1;
  select.replaceChildren(...next.map(({ name, version }) => new Option(isSeveral ? `${name}, version ${version}` : name, keyOf(name, version))));
  if (names.includes(before)) select.value = before;
  else void choose();
}

function writtenInputs({ inputs }: Method): Input[] {
  let given: Record<string, unknown>;
  try {
    given = JSON.parse(input("method-inputs").value);
  } catch (error) {
    throw new Error(`Invalid JSON: ${messageOf(error)}`);
  }
  return Object.entries(given ?? {}).map(([name, data]) => {
    const datatype = inputs.find((one) => one.name === name)?.datatype ?? "FP32";
    return { name, datatype, shape: shapeOf(data), data };
  });
}

function outputElement(tensor: Tensor): HTMLElement {
  const text = listOf(tensor, MAX_VALUES_SHOWN);
  const { pictures, note } = picturesOf(tensor);
  const type = make("span", { class: "dim" }, ` ${tensor.datatype}[${tensor.shape.join(", ")}]`);
  const head = make("div", { class: "code-head" }, make("span", {}, make("strong", {}, tensor.name), type), copyButton(`Copy ${tensor.name}`, () => listOf(tensor, Infinity)));
  const values = make("pre", { tabindex: 0 }, text);
  const output = make("section", { class: "code output", "aria-label": tensor.name }, head);
  if (!pictures.length) output.append(values);
  else output.append(make("div", { class: "pictures" }, ...pictures), make("details", {}, make("summary", {}, note ? `Values. ${note}` : "Values"), values));
  return output;
}

async function run(event: Event): Promise<void> {
  event.preventDefault();
  if (!current || running) return;
  const { name, version } = current;
  let body: [string, Blob];
  try {
    body = bodyOf(isForm ? current.form.inputs() : writtenInputs(current));
  } catch (error) {
    showError(messageOf(error));
    return;
  }
  running = new AbortController();
  input("method-run").disabled = true;
  field("method-stop").hidden = false;
  const start = performance.now();
  try {
    const outputs = outputsOf(...(await infer(name, version, ...body, running.signal)));
    field("method-time").textContent = `${(performance.now() - start).toFixed(1)} ms`;
    field("method-answer").replaceChildren(...outputs.map(outputElement));
    field("method-answer").scrollIntoView({ block: "nearest" });
  } catch (error) {
    field("method-time").textContent = "";
    showError(isAbort(error) ? "Stopped." : messageOf(error));
  }
  running = null;
  input("method-run").disabled = current === null;
  field("method-stop").hidden = true;
}

export function startMethods(): void {
  field("method").addEventListener("change", () => void choose());
  field("method-inputs").addEventListener("input", () => current && (current.json = input("method-inputs").value));
  for (const name of ["form", "json"]) {
    field(`as-${name}`).addEventListener("click", () => {
      isForm = name === "form";
      showInputs();
    });
  }
  field("method-form").addEventListener("submit", (event) => void run(event));
  field("method-stop").addEventListener("click", () => running?.abort());
}
