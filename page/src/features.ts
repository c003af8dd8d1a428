// The tabs of the settings panel for JSON schemas and tools. Each exists only if the service's description says that it accepts the field.

import { field, input } from "./dom";
import { type Description, type Settings, getDescription } from "./service";

const REQUEST = "ChatCompletionRequest";
const TABS = ["sampling", "schema", "tools"] as const;
type Tab = (typeof TABS)[number];
let known: Promise<void> | null = null;

// Yields all objects in a JSON schema, and those it refers to by name.
function* partsOf(schema: unknown, description: Description, depth = 0): Generator<Record<string, unknown>> {
  if (typeof schema !== "object" || schema === null || depth > 8) return;
  yield schema as Record<string, unknown>;
  for (const [key, value] of Object.entries(schema)) {
    if (key === "$ref" && typeof value === "string") yield* partsOf(description.components.schemas[value.split("/").pop()!], description, depth + 1);
    else yield* partsOf(value, description, depth + 1);
  }
}

function accepts(description: Description, name: string, isMatch: (part: Record<string, unknown>) => boolean): boolean {
  const shape = description.components.schemas[REQUEST]?.properties?.[name];
  return shape !== undefined && [...partsOf(shape, description)].some(isMatch);
}

const includes = (value: unknown, item: string): boolean => value === item || (Array.isArray(value) && value.includes(item));

function choose(tab: Tab): void {
  for (const name of TABS) {
    field(`tab-${name}`).setAttribute("aria-selected", String(name === tab));
    field(`tab-${name}`).tabIndex = name === tab ? 0 : -1;
    field(`of-${name}`).hidden = name !== tab;
  }
}

// Parses the text of a tab. Returns undefined if the tab is off or empty, and null if the text is not JSON.
function valueOf(tab: Tab): unknown {
  const area = input(`${tab}-text`);
  if (field(`tab-${tab}`).hidden || !area.value.trim()) return undefined;
  try {
    field(`${tab}-error`).textContent = "";
    return JSON.parse(area.value);
  } catch (error) {
    field(`${tab}-error`).textContent = `Invalid JSON: ${(error as Error).message}`;
    choose(tab);
    area.focus();
    return null;
  }
}

export function requestFeatures(): Settings | null {
  const schema = valueOf("schema");
  const tools = valueOf("tools");
  if (schema === null || tools === null) return null;
  const settings: Settings = {};
  if (schema !== undefined) settings["response_format"] = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools !== undefined) settings["tools"] = tools;
  return settings;
}

async function look(): Promise<void> {
  const description = await getDescription();
  field("tab-schema").hidden = !accepts(description, "response_format", (part) => includes(part["enum"], "json_schema") || part["const"] === "json_schema");
  field("tab-tools").hidden = !accepts(description, "tools", (part) => includes(part["type"], "array"));
  field("tabs").hidden = field("tab-schema").hidden && field("tab-tools").hidden;
}

// Reads the service's description when the panel is opened for the first time.
export function lookForFeatures(): void {
  known ??= look().catch(() => void (known = null));
}

export function startFeatures(): void {
  for (const name of TABS) field(`tab-${name}`).addEventListener("click", () => choose(name));
  field("tabs").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const shown = TABS.filter((name) => !field(`tab-${name}`).hidden);
    const at = shown.findIndex((name) => field(`tab-${name}`).getAttribute("aria-selected") === "true");
    const next = shown[(at + (event.key === "ArrowRight" ? 1 : -1) + shown.length) % shown.length]!;
    choose(next);
    field(`tab-${next}`).focus();
  });
}
