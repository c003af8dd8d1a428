// A conversation: a tree of turns, of which one path is shown. A turn that was edited or asked for again has siblings.

import { formatJson } from "./json_text";
import type { Message, ToolCall } from "./service";

export interface Attachment {
  name: string;
  text: string;
}

export interface Turn {
  id: string;
  parent: string | null;
  role: "user" | "assistant" | "tool";
  text: string;
  created: number; // ms since 1970
  attachments?: Attachment[];
  calls?: ToolCall[]; // the functions that the model calls
  callId?: string; // the call that this turn answers
  callName?: string; // the function of that call
  thoughts?: string; // of the model, before its text
  thoughtsMs?: number; // the time that they took
  schema?: unknown; // the JSON schema that the text follows
  figures?: string[];
  error?: string;
  isCut?: boolean; // the answer has not come to its end
}

export interface Conversation {
  id: string;
  title: string;
  isNamed: boolean; // by the user
  model: string;
  isChat: boolean; // otherwise the model continues a text
  system: string;
  created: number;
  changed: number;
  turns: Record<string, Turn>;
  leaf: string | null; // the last turn of the path
}

const MAX_TITLE_CHARS = 60;

// Pages of plain HTTP on another machine have no crypto.randomUUID.
const newId = (): string => Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(36)).join("");

export function newConversation(model: string, isChat: boolean): Conversation {
  const now = Date.now();
  return { id: newId(), title: "", isNamed: false, model, isChat, system: "", created: now, changed: now, turns: {}, leaf: null };
}

// Appends a turn below a parent, and makes it the end of the path.
export function addTurn(conversation: Conversation, parent: string | null, turn: Omit<Turn, "id" | "parent" | "created">): Turn {
  const added: Turn = { id: newId(), parent, created: Date.now(), ...turn };
  conversation.turns[added.id] = added;
  conversation.leaf = added.id;
  conversation.changed = added.created;
  if (!conversation.isNamed && parent === null && turn.role === "user") conversation.title = titleOf(turn.text || (turn.attachments?.[0]?.name ?? ""));
  return added;
}

export function titleOf(text: string): string {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > MAX_TITLE_CHARS ? `${line.slice(0, MAX_TITLE_CHARS - 1)}\u2026` : line;
}

// Returns the turns from the first to `end`.
export function pathOf(conversation: Conversation, end = conversation.leaf): Turn[] {
  const path: Turn[] = [];
  for (let id = end; id !== null; id = path[0]!.parent) {
    const turn = conversation.turns[id];
    if (!turn || path.includes(turn)) break;
    path.unshift(turn);
  }
  return path;
}

export function siblingsOf(conversation: Conversation, turn: Turn): Turn[] {
  return Object.values(conversation.turns)
    .filter((other) => other.parent === turn.parent)
    .sort((a, b) => a.created - b.created);
}

// Shows a turn and its newest descendants.
export function choose(conversation: Conversation, turn: Turn): void {
  let end = turn;
  for (;;) {
    const next = Object.values(conversation.turns)
      .filter(({ parent }) => parent === end.id)
      .sort((a, b) => b.created - a.created)[0];
    if (!next) break;
    end = next;
  }
  conversation.leaf = end.id;
}

// Returns a new conversation with the turns up to `turn`.
export function branchAt(conversation: Conversation, turn: Turn): Conversation {
  const path = pathOf(conversation, turn.id);
  return {
    ...structuredClone(conversation),
    id: newId(),
    title: titleOf(`${conversation.title} (branch)`),
    isNamed: true,
    created: Date.now(),
    changed: Date.now(),
    turns: Object.fromEntries(path.map((one) => [one.id, structuredClone(one)])),
    leaf: turn.id,
  };
}

// Returns backticks that do not occur in a text.
function fenceOf(text: string): string {
  let fence = "```";
  while (text.includes(fence)) fence += "`";
  return fence;
}

// Returns what the model reads: the attached files as code blocks, then the text.
export function contentOf(turn: Turn): string {
  const files = (turn.attachments ?? []).map(({ name, text }) => {
    const fence = fenceOf(text);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...files, turn.text].filter(Boolean).join("\n\n");
}

// Empty answers are not sent to the model.
export function messagesOf(conversation: Conversation, end: string | null): Message[] {
  const messages: Message[] = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  for (const turn of pathOf(conversation, end)) {
    const content = contentOf(turn);
    if (turn.role === "tool") messages.push({ role: "tool", content, tool_call_id: turn.callId ?? "" });
    else if (content || turn.calls?.length) {
      // The chat template decides which thoughts the model reads again.
      const thoughts = turn.thoughts ? { reasoning_content: turn.thoughts } : {};
      messages.push({ role: turn.role, content, ...thoughts, ...(turn.calls?.length ? { tool_calls: turn.calls } : {}) });
    }
  }
  return messages;
}

export const isFoundBy = (conversation: Conversation, words: string): boolean =>
  [conversation.title, ...Object.values(conversation.turns).map(({ text }) => text)].some((text) => text.toLowerCase().includes(words));

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool" };

// Returns JSON as a code block of Markdown.
export const codeBlock = (text: string): string => `${fenceOf(text)}json\n${text}\n${fenceOf(text)}`;
const quoted = (text: string): string => text.trim().replace(/^/gm, "> ");

// What a person reads of a turn: its thoughts as a quotation, JSON as a code block, and its calls.
function partsOf(turn: Turn): string[] {
  const thoughts = turn.thoughts?.trim() ? [`> **Thoughts**\n>\n${quoted(turn.thoughts)}`] : [];
  const content = turn.schema === undefined || !turn.text ? contentOf(turn) : codeBlock(formatJson(turn.text));
  const calls = (turn.calls ?? []).map(({ function: called }) => `Call of \`${called.name}\`:\n\n${codeBlock(formatJson(called.arguments))}`);
  return [...thoughts, content, ...calls];
}

export function asMarkdown(conversation: Conversation): string {
  const parts = [`# ${conversation.title}`, `Model: ${conversation.model}  \nDate: ${new Date(conversation.created).toISOString()}`];
  if (conversation.system) parts.push("## System", conversation.system);
  for (const turn of pathOf(conversation)) {
    parts.push(`## ${NAMES[turn.role]}${turn.callName ? `: ${turn.callName}` : ""}`, ...partsOf(turn));
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}

const isText = (value: unknown): value is string => typeof value === "string";

function readTurn(value: any): Turn {
  if (!isText(value?.id) || !isText(value.text) || !(value.role in NAMES)) throw new Error("a turn needs id, role and text");
  for (const name of ["thoughts", "callName", "callId"]) if (name in value && !isText(value[name])) throw new Error(`${name}: expected a text`);
  return { ...value, parent: isText(value.parent) ? value.parent : null, created: Number(value.created) || Date.now() };
}

// Reads conversations that were exported as JSON. They get new ids, so that nothing is replaced.
export function readConversations(text: string): Conversation[] {
  const values: any[] = [JSON.parse(text)].flat();
  return values.map((value) => {
    if (!isText(value?.model) || typeof value.turns !== "object" || value.turns === null) throw new Error("expected conversations with model and turns");
    const turns = Object.values<any>(value.turns).map(readTurn);
    const made = newConversation(value.model, value.isChat !== false);
    const leaf = turns.some(({ id }) => id === value.leaf) ? value.leaf : (turns.at(-1)?.id ?? null);
    const texts = { title: isText(value.title) ? value.title : "", system: isText(value.system) ? value.system : "" };
    return { ...made, ...texts, isNamed: true, created: Number(value.created) || made.created, turns: Object.fromEntries(turns.map((turn) => [turn.id, turn])), leaf };
  });
}
