// The tabs of the settings panel for JSON schemas and tools. Each exists only if the service's description says that it accepts the field.

import { field, input } from "./dom";
import { allows } from "./schema";
import { type Description, type Settings, getDescription } from "./service";

const REQUEST = "ChatCompletionRequest";
const TABS = ["sampling", "schema", "tools"] as const;
type Tab = (typeof TABS)[number];
let known: Promise<void> | null = null;

// What the tabs send, to see whether the service's schema allows it.
const FORMAT = { type: "json_schema", json_schema: { name: "answer", schema: { type: "object" } } };
const TOOL_LIST = [{ type: "function", function: { name: "weather", parameters: {} } }];

function accepts(description: Description, name: string, value: unknown): boolean {
  const shape = description.components.schemas[REQUEST]?.properties?.[name];
  return shape !== undefined && allows(shape, value, description);
}

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
  field("tab-schema").hidden = !accepts(description, "response_format", FORMAT);
  field("tab-tools").hidden = !accepts(description, "tools", TOOL_LIST);
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
