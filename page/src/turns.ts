// The elements of a conversation's turns.

import { type Turn, contentOf } from "./conversation";
import { type Child, copyButton, iconButton, make, textButton } from "./dom";
import { MarkdownView } from "./markdown";
import type { ToolCall } from "./service";

// What a turn offers. An action that is missing is not offered.
export interface Actions {
  edit?: () => void;
  retry?: () => void;
  resume?: () => void;
  branch?: () => void;
  answerCalls?: (results: string[]) => void;
  siblings?: { at: number; count: number; show: (at: number) => void };
}

function switcher({ at, count, show }: NonNullable<Actions["siblings"]>): HTMLElement {
  const previous = iconButton("previous", "Previous version", () => show(at - 1));
  const next = iconButton("next", "Next version", () => show(at + 1));
  previous.disabled = at === 0;
  next.disabled = at === count - 1;
  return make("span", { class: "versions", role: "group", "aria-label": "Versions" }, previous, make("span", {}, `${at + 1} / ${count}`), next);
}

function buttonsOf(text: string, actions: Actions): Child[] {
  const buttons: Child[] = [];
  if (actions.siblings) buttons.push(switcher(actions.siblings));
  if (text) buttons.push(copyButton("Copy", () => text));
  if (actions.edit) buttons.push(iconButton("edit", "Edit and resend", actions.edit));
  if (actions.retry) buttons.push(iconButton("retry", "Regenerate", actions.retry));
  if (actions.resume) buttons.push(iconButton("resume", "Continue", actions.resume));
  if (actions.branch) buttons.push(iconButton("branch", "Branch into a new conversation", actions.branch));
  return buttons;
}

export function userArticle(turn: Turn, actions: Actions): HTMLElement {
  const files = (turn.attachments ?? []).map(({ name, text }) => make("details", { class: "file" }, make("summary", {}, name), make("pre", { tabindex: 0 }, text)));
  const bubble = make("div", { class: "bubble" }, ...files);
  if (turn.text || !files.length) bubble.append(make("div", { class: "text" }, turn.text));
  const label = turn.role === "tool" ? "Tool result" : "You";
  return make("article", { class: "user", "aria-label": label }, bubble, make("div", { class: "actions" }, ...buttonsOf(contentOf(turn), actions)));
}

// A form in place of a turn, to change its text.
export function editArticle(turn: Turn, send: (text: string) => void, cancel: () => void): HTMLElement {
  const area = make("textarea", { rows: 3, "aria-label": "Edit message", class: "editor" });
  area.value = turn.text;
  const submit = make("button", { type: "submit", class: "primary" }, "Send");
  const form = make("form", {}, area, make("div", { class: "line end" }, textButton("Cancel", cancel), submit));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(area.value);
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send(area.value);
  });
  return make("article", { class: "user edited", "aria-label": "You" }, form);
}

// The calls of functions in an answer, with fields for what they return.
function callsForm(calls: ToolCall[], answer: Actions["answerCalls"]): HTMLElement {
  const fields: HTMLTextAreaElement[] = [];
  const form = make("form", { class: "calls" });
  for (const { function: called } of calls) {
    form.append(make("pre", { tabindex: 0 }, make("code", {}, `${called.name}(${called.arguments})`)));
    if (!answer) continue;
    const area = make("textarea", { rows: 2 });
    fields.push(area);
    form.append(make("label", {}, `Result of ${called.name}`, area));
  }
  if (!answer) return form;
  form.append(make("button", { type: "submit", class: "primary" }, fields.length > 1 ? "Send results" : "Send result"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    answer(fields.map(({ value }) => value));
  });
  return form;
}

// An answer, which may grow. `given`: the user's text that the model continues; null in a conversation.
export class AnswerView {
  readonly article: HTMLElement;
  #text = make("div", { class: "text" });
  #markdown: MarkdownView | null = null;
  #plain = document.createTextNode("");

  constructor(given: string | null) {
    this.article = make("article", { class: "assistant", "aria-label": "Answer" }, this.#text);
    if (given === null) this.#markdown = new MarkdownView(this.#text);
    else {
      this.#text.classList.add("plain");
      this.#text.append(make("span", { class: "given" }, given), this.#plain);
    }
  }

  show(text: string, isComplete: boolean): void {
    if (this.#markdown) this.#markdown.show(text, isComplete);
    else this.#plain.data = text;
    this.article.classList.toggle("waits", !isComplete);
  }

  finish(turn: Turn, actions: Actions): void {
    this.show(turn.text, true);
    if (turn.calls?.length) this.article.append(callsForm(turn.calls, actions.answerCalls));
    if (turn.error) this.article.append(make("p", { class: "error" }, turn.error));
    const figures = make("span", { class: "figure" }, (turn.figures ?? []).join(" \u00b7 "));
    this.article.append(make("div", { class: "foot" }, figures, make("span", { class: "actions" }, ...buttonsOf(turn.text, actions))));
  }
}
