// The elements of a conversation's turns.

import { type Turn, codeBlock, contentOf } from "./conversation";
import { type Child, copyButton, icon, iconButton, make, textButton } from "./dom";
import { seconds } from "./figures";
import { formatJson, judge } from "./json_text";
import { MarkdownView, showCode } from "./markdown";
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
  const buttons = make("div", { class: "actions" }, ...buttonsOf(contentOf(turn), actions));
  if (turn.role === "tool") {
    const name = turn.callName ?? "the tool";
    const head = make("div", { class: "call-head" }, icon("check"), make("span", {}, "Result of ", make("strong", {}, name)));
    return make("article", { class: "tool", "aria-label": `Result of ${name}` }, make("div", { class: "call" }, head, make("pre", { tabindex: 0 }, turn.text || "(empty)")), buttons);
  }
  const files = (turn.attachments ?? []).map(({ name, text }) => make("details", { class: "file" }, make("summary", {}, name), make("pre", { tabindex: 0 }, text)));
  const bubble = make("div", { class: "bubble" }, ...files);
  if (turn.text || !files.length) bubble.append(make("div", { class: "text" }, turn.text));
  return make("article", { class: "user", "aria-label": "You" }, bubble, buttons);
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

// The card of a call: the function's name and its arguments.
function callCard({ function: called }: ToolCall): HTMLElement {
  const head = make("div", { class: "call-head" }, icon("tool"), make("strong", {}, called.name));
  const card = make("div", { class: "call", role: "group", "aria-label": `Call of ${called.name}` }, head);
  if (/^\s*(\{\s*\})?\s*$/.test(called.arguments)) head.append(make("span", { class: "dim" }, "without arguments"));
  else {
    const text = formatJson(called.arguments);
    head.append(copyButton("Copy arguments", () => text));
    showCode(card, text, "json");
  }
  return card;
}

// The fields for what the called functions return. Enter goes to the next field, and sends from the last one.
function resultsForm(calls: ToolCall[], answer: NonNullable<Actions["answerCalls"]>): HTMLElement {
  const fields = calls.map(() => make("textarea", { rows: 2, spellcheck: "false" }));
  const labels = calls.map(({ function: called }, at) => make("label", {}, `Result of ${called.name}`, fields[at]!));
  const submit = make("button", { type: "submit", class: "primary" }, calls.length > 1 ? "Send results" : "Send result");
  const form = make("form", { class: "results" }, ...labels, submit);
  fields.forEach((area, at) =>
    area.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      const next = fields[at + 1];
      if (next) next.focus();
      else form.requestSubmit();
    }),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    answer(fields.map(({ value }) => value));
  });
  return form;
}

// The thoughts before an answer: open while they grow, then folded, unless the user has opened or folded them.
class ThoughtsView {
  readonly element: HTMLDetailsElement;
  #summary = make("summary");
  #text = make("div", { class: "text" });
  #markdown = new MarkdownView(this.#text);
  #isOwn = false; // the user has chosen whether they are open
  #shown: string | null = null;

  constructor() {
    this.element = make("details", { class: "thoughts" }, this.#summary, this.#text);
    this.#summary.addEventListener("click", () => (this.#isOwn = true));
  }

  show(turn: Turn, isGrowing: boolean): void {
    if (!this.#isOwn) this.element.open = isGrowing;
    this.#summary.textContent = isGrowing ? "Thinking\u2026" : `Thoughts${(turn.thoughtsMs ?? 0) < 1 ? "" : ` (${seconds(turn.thoughtsMs! / 1000)})`}`;
    const key = `${isGrowing} ${turn.thoughts!.length}`;
    if (key === this.#shown) return;
    this.#shown = key;
    this.#markdown.show(turn.thoughts!, !isGrowing);
  }
}

// An answer, which may grow. `given`: the user's text that the model continues; null in a conversation.
export class AnswerView {
  readonly article: HTMLElement;
  #thoughts = new ThoughtsView();
  #text = make("div", { class: "text" });
  #calls = make("div", { class: "calls" });
  #numCalls = 0;
  #markdown: MarkdownView | null = null;
  #plain = document.createTextNode("");

  constructor(given: string | null) {
    this.article = make("article", { class: "assistant", "aria-label": "Answer" }, this.#text, this.#calls);
    if (given === null) this.#markdown = new MarkdownView(this.#text);
    else {
      this.#text.classList.add("plain");
      this.#text.append(make("span", { class: "given" }, given), this.#plain);
    }
  }

  show(turn: Turn, isComplete: boolean): void {
    const { text, calls = [] } = turn;
    if (turn.thoughts?.trim()) {
      if (!this.#thoughts.element.parentNode) this.#text.before(this.#thoughts.element);
      this.#thoughts.show(turn, !isComplete && !text && !calls.length);
    }
    if (!this.#markdown) this.#plain.data = text;
    else if (turn.schema === undefined || !text) this.#markdown.show(text, isComplete);
    else this.#markdown.show(codeBlock(isComplete ? formatJson(text) : text), isComplete);
    if (isComplete || calls.length !== this.#numCalls) this.#calls.replaceChildren(...calls.map(callCard));
    this.#numCalls = calls.length;
    this.article.classList.toggle("waits", !isComplete);
  }

  finish(turn: Turn, actions: Actions): void {
    this.show(turn, true);
    if (turn.schema !== undefined && turn.text) {
      const { isGood, words } = judge(turn.text, turn.schema, Boolean(turn.isCut));
      this.article.append(make("p", { class: isGood ? "verdict good" : "verdict error" }, icon(isGood ? "check" : "close"), words));
    }
    if (turn.calls?.length && actions.answerCalls) this.article.append(resultsForm(turn.calls, actions.answerCalls));
    if (turn.error) this.article.append(make("p", { class: "error" }, turn.error));
    const figures = make("span", { class: "figure" }, (turn.figures ?? []).join(" \u00b7 "));
    this.article.append(make("div", { class: "foot" }, figures, make("span", { class: "actions" }, ...buttonsOf(turn.text, actions))));
  }
}
