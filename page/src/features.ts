// What a request may ask beside sampling: a JSON schema, tools, and how the model thinks. A control exists only if the service's
// description accepts what it sends, and the model's chat template has it.

import { field, input, messageOf, textButton } from "./dom";
import { mismatch } from "./schema";
import { type Description, type Model, type Settings, getDescription } from "./service";

const REQUEST = "ChatCompletionRequest";
const TABS = ["sampling", "schema", "tools"] as const;
type Tab = (typeof TABS)[number];
const EFFORTS = ["low", "medium", "high"];

// Fields of the panel that are kept in the browser.
export const FEATURE_FIELDS = ["thinking", "effort", "schema-text", "tools-text", "tool_choice"];

let description: Description | null = null;
let known: Promise<void> | null = null;
let model: Model | null = null;
let openPanel: () => void = () => {};

// What the controls send, to see whether the service's schema allows it.
const SCHEMA = { type: "object", properties: { name: { type: "string" }, tags: { type: "array", items: { type: "string" } } }, required: ["name", "tags"], additionalProperties: false };
const PARAMETERS = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const TOOLS = [{ type: "function", function: { name: "weather", description: "The weather of a city now.", parameters: PARAMETERS } }];
const EXAMPLES = { schema: SCHEMA, tools: TOOLS };
const formatOf = (schema: unknown): unknown => ({ type: "json_schema", json_schema: { name: "answer", schema } });

function accepts(name: string, value: unknown): boolean {
  const shape = description?.components.schemas[REQUEST]?.properties?.[name];
  return shape !== undefined && mismatch(shape, value, description) === null;
}

// A service that does not say what the chat template has may take everything.
const hasFeature = (name: string): boolean => !model?.chat_features || model.chat_features.includes(name);

// The variable by which the chat template switches thinking.
const switchName = (): string | undefined => ["enable_thinking", "thinking"].find((name) => model?.chat_features?.includes(name));

function choose(tab: Tab): void {
  for (const name of TABS) {
    field(`tab-${name}`).setAttribute("aria-selected", String(name === tab));
    field(`tab-${name}`).tabIndex = name === tab ? 0 : -1;
    field(`of-${name}`).hidden = name !== tab;
  }
}

const isOn = (tab: Tab): boolean => !field(`tab-${tab}`).hidden && input(`${tab}-text`).value.trim() !== "";

// Takes tools as they are found in documents: one tool or a list, with or without the part around the function.
function toolList(value: unknown): unknown {
  return [value].flat().map((tool: any) => (tool?.function || !tool?.name ? tool : { type: "function", function: { name: tool.name, description: tool.description, parameters: tool.parameters ?? tool.input_schema } }));
}

// Reads the text of a tab. The value is undefined if the tab is off or empty, and null if the text is wrong.
function parse(tab: "schema" | "tools"): { value: unknown; error: string } {
  if (!isOn(tab)) return { value: undefined, error: "" };
  try {
    const value: unknown = JSON.parse(input(`${tab}-text`).value);
    if (tab === "tools") {
      const tools = toolList(value) as any[];
      if (!tools.every((tool) => typeof tool?.function?.name === "string" && tool.function.name)) throw new Error("Each tool needs a function with a name.");
      return { value: tools, error: "" };
    }
    if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error("A JSON schema is an object.");
    return { value, error: "" };
  } catch (error) {
    return { value: null, error: error instanceof SyntaxError ? `Invalid JSON: ${error.message}` : messageOf(error) };
  }
}

function valueOf(tab: "schema" | "tools"): unknown {
  const { value, error } = parse(tab);
  field(`${tab}-error`).textContent = error;
  return value;
}

// Says below the prompt what requests ask for, because the panel may be closed.
function showActive(): void {
  const place = field("active");
  const tools = parse("tools").value;
  const words: [Tab, string][] = [];
  if (isOn("schema")) words.push(["schema", "Answers follow a JSON schema"]);
  if (tools !== undefined) words.push(["tools", Array.isArray(tools) ? `${tools.length} ${tools.length === 1 ? "tool" : "tools"}` : "Tools"]);
  if (!field("thinking-field").hidden && input("thinking").value) words.push(["sampling", `Thinking ${input("thinking").value}`]);
  const text = words.map(([, one]) => one).join("\n");
  if (place.dataset["of"] === text) return;
  place.dataset["of"] = text;
  const open = (tab: Tab): void => {
    openPanel();
    choose(tab);
    (tab === "sampling" ? input("thinking") : input(`${tab}-text`)).focus();
  };
  place.replaceChildren(...words.map(([tab, one]) => textButton(one, () => open(tab))));
  place.hidden = !words.length;
}

function showControls(): void {
  const isChat = Boolean(model?.has_chat_template);
  const takesSwitch = switchName() !== undefined && accepts("chat_template_kwargs", { [switchName()!]: false });
  const efforts = hasFeature("reasoning_effort") ? EFFORTS.filter((name) => accepts("reasoning_effort", name)) : [];
  field("tab-schema").hidden = !isChat || !accepts("response_format", formatOf(SCHEMA));
  field("tab-tools").hidden = !isChat || !hasFeature("tools") || !accepts("tools", TOOLS);
  field("thinking-field").hidden = !isChat || !takesSwitch;
  field("effort-field").hidden = !isChat || !model?.chat_features || !efforts.length;
  field("tabs").hidden = field("tab-schema").hidden && field("tab-tools").hidden;
  if (field("of-schema").hidden !== field("tab-schema").hidden || field("of-tools").hidden !== field("tab-tools").hidden) {
    const open = TABS.find((name) => !field(`of-${name}`).hidden)!;
    if (field(`tab-${open}`).hidden) choose("sampling");
  }
  showActive();
}

export function setFeaturesOf(next: Model | null): void {
  model = next;
  showControls();
}

// Returns the fields of a request, and null if one of the texts is wrong; its tab is then open.
export function requestFeatures(): Settings | null {
  const settings: Settings = {};
  for (const tab of ["schema", "tools"] as const) {
    const value = valueOf(tab);
    if (value === null) {
      choose(tab);
      input(`${tab}-text`).focus();
      return null;
    }
    if (value === undefined) continue;
    settings[tab === "schema" ? "response_format" : "tools"] = tab === "schema" ? formatOf(value) : value;
  }
  if (settings["tools"] && input("tool_choice").value) settings["tool_choice"] = input("tool_choice").value;
  const thinking = field("thinking-field").hidden ? "" : input("thinking").value;
  if (thinking) settings["chat_template_kwargs"] = { [switchName()!]: thinking === "on" };
  const effort = field("effort-field").hidden ? "" : input("effort").value;
  if (effort) settings["reasoning_effort"] = effort;
  return settings;
}

export const hasThoughts = (): boolean => Boolean(model?.chat_features?.includes("thoughts"));

// Returns the JSON schema that the fields of a request ask for.
export const schemaOf = (settings: Settings): unknown => (settings["response_format"] as any)?.json_schema?.schema;

async function look(): Promise<void> {
  description = await getDescription();
  showControls();
}

// Reads the service's description, with the first use of the panel, or at once if a control is in use.
export function lookForFeatures(): void {
  known ??= look().catch(() => void (known = null));
}

export function startFeatures(open: () => void): void {
  openPanel = open;
  for (const name of TABS) field(`tab-${name}`).addEventListener("click", () => choose(name));
  field("tabs").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const shown = TABS.filter((name) => !field(`tab-${name}`).hidden);
    const at = shown.findIndex((name) => field(`tab-${name}`).getAttribute("aria-selected") === "true");
    const next = shown[(at + (event.key === "ArrowRight" ? 1 : -1) + shown.length) % shown.length]!;
    choose(next);
    field(`tab-${next}`).focus();
  });
  for (const tab of ["schema", "tools"] as const) {
    field(`${tab}-example`).addEventListener("click", () => {
      input(`${tab}-text`).value = JSON.stringify(EXAMPLES[tab], null, 2);
      input(`${tab}-text`).dispatchEvent(new Event("input", { bubbles: true }));
    });
    field(`${tab}-clear`).addEventListener("click", () => {
      input(`${tab}-text`).value = "";
      input(`${tab}-text`).dispatchEvent(new Event("input", { bubbles: true }));
    });
    input(`${tab}-text`).addEventListener("change", () => void valueOf(tab));
  }
  field("panel").addEventListener("input", showActive);
  if (FEATURE_FIELDS.some((name) => input(name).value)) lookForFeatures();
}
