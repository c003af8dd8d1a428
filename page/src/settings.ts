// The settings panel: the system prompt, and sampling settings as fields of a request.

import { field, input, store, stored } from "./dom";
import { FEATURE_FIELDS, hasThoughts, requestFeatures } from "./features";
import type { Settings } from "./service";

const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"];
const SAMPLING = [...NUMBERS, "stop_text", "thinking", "effort"];
const KEPT = [...new Set([...SAMPLING, ...FEATURE_FIELDS, "system"])];
const MAX_TOKENS = 512; // the default, which ends runaway answers
const MAX_WITH_THOUGHTS = 2048; // the default where an answer begins with thoughts
const STORE = "penstock-settings";

const defaultTokens = (): number => (hasThoughts() ? MAX_WITH_THOUGHTS : MAX_TOKENS);

export function showDefaults(): void {
  input("max_tokens").placeholder = String(defaultTokens());
}

// Returns only the filled-in fields; the model's defaults apply to the others. Returns null if a field is invalid.
export function requestSettings(isChat: boolean): Settings | null {
  const settings: Settings = { max_tokens: defaultTokens() };
  for (const name of NUMBERS) {
    const one = input(name);
    if (one.value === "" && !one.validity.badInput) continue;
    if (!one.checkValidity()) {
      showPanel(true);
      one.reportValidity();
      return null;
    }
    settings[name] = one.valueAsNumber;
  }
  if (input("stop_text").value) settings["stop"] = [input("stop_text").value];
  if (!isChat) return settings;
  const features = requestFeatures();
  if (features === null) {
    showPanel(true);
    return null;
  }
  return { ...settings, ...features };
}

export const systemPrompt = (): string => input("system").value.trim();

export function setSystemPrompt(text: string): void {
  input("system").value = text;
  keep();
}

function keep(): void {
  store(STORE, JSON.stringify(Object.fromEntries(KEPT.map((name) => [name, input(name).value]))));
}

function restore(): void {
  try {
    const values = JSON.parse(stored(STORE) ?? "{}");
    for (const name of KEPT) if (typeof values[name] === "string") input(name).value = values[name];
  } catch {
    // what is stored is not from this page
  }
}

export function showPanel(isOpen: boolean): void {
  field("panel").hidden = !isOpen;
  field("show-panel").setAttribute("aria-expanded", String(isOpen));
}

export function startSettings(): void {
  restore();
  field("panel").addEventListener("input", keep);
  field("defaults").addEventListener("click", () => {
    for (const name of SAMPLING) input(name).value = "";
    field("panel").dispatchEvent(new Event("input"));
  });
}
