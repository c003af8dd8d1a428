// Converts the sampling settings of the form into fields of a request.

const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];
const KEPT = [...NUMBERS, "stop_text", "system"];
const MAX_TOKENS = 512; // the default, which ends runaway answers
const STORE = "penstock-settings";
const field = (name) => document.getElementById(name);

// Returns only the filled-in fields; the model's defaults apply to the others.
export function requestSettings() {
  const settings = { max_tokens: MAX_TOKENS };
  for (const name of NUMBERS) {
    const input = field(name);
    if (input.value === "" && !input.validity.badInput) continue;
    if (!input.checkValidity()) {
      field("settings").open = true;
      input.reportValidity();
      return null;
    }
    settings[name] = input.valueAsNumber;
  }
  if (field("stop_text").value) settings.stop = [field("stop_text").value];
  return settings;
}

export const systemPrompt = () => field("system").value.trim();

function keep() {
  const values = Object.fromEntries(KEPT.map((name) => [name, field(name).value]));
  try {
    localStorage.setItem(STORE, JSON.stringify(values));
  } catch {
    // storage is not available
  }
}

function restore() {
  try {
    const values = JSON.parse(localStorage.getItem(STORE) ?? "{}");
    for (const name of KEPT) if (typeof values[name] === "string") field(name).value = values[name];
  } catch {
    // nothing stored, or something else
  }
}

export function startSettings() {
  restore();
  field("settings").addEventListener("input", keep);
  field("defaults").addEventListener("click", () => {
    for (const name of KEPT) field(name).value = "";
    keep();
  });
}
