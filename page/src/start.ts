// The start view, in place of an empty conversation: the model, how to begin, and examples.

import { field, make } from "./dom";
import { number } from "./figures";
import type { Model } from "./service";

const QUESTIONS = ["Explain what a mutex is.", "Write a haiku about rivers.", "Compare TCP and UDP in a table."];
const BEGINNINGS = ["def add(a, b):", "import json\n\n", "The quick brown fox"];

// `begin` takes the text of an example that the user has chosen.
export function showStart(model: Model | null, isEmpty: boolean, begin: (text: string) => void): void {
  const start = field("start");
  start.hidden = !isEmpty || !model;
  if (start.hidden || !model) return;
  const chat = Boolean(model.has_chat_template);
  const words = [model.id, model.network, model.scheme, String(model.max_model_len), String(chat)].join("\n");
  if (start.dataset["of"] === words) return; // drawn already; the focus may be on an example
  start.dataset["of"] = words;
  start.classList.toggle("continues", !chat);
  field("start-name").textContent = model.id;
  field("start-about").textContent = [model.network, model.scheme, model.max_model_len && `up to ${number(model.max_model_len)} tokens`].filter(Boolean).join(" \u00b7 ");
  field("start-hint").textContent = chat
    ? "Ask anything. Enter sends, Shift+Enter starts a new line."
    : "Enter the beginning of a text; the model continues it. Enter sends, Shift+Enter starts a new line.";
  const examples = (chat ? QUESTIONS : BEGINNINGS).map((text) => {
    const button = make("button", { type: "button" }, text.trim());
    button.addEventListener("click", () => begin(text));
    return make("li", {}, button);
  });
  field("start-examples").replaceChildren(...examples);
}
