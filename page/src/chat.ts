// The chat view: a conversation if the model has a chat template, otherwise completions of a text.

import { attachments, setAttachments, startAttachments } from "./attachments";
import { type Conversation, type Turn, addTurn, branchAt, choose, contentOf, messagesOf, newConversation, pathOf, siblingsOf } from "./conversation";
import { field, input, isAbort, messageOf } from "./dom";
import { schemaOf, setFeaturesOf } from "./features";
import { type Timing, figuresOf } from "./figures";
import { draw as drawList } from "./list";
import { type Delta, type Model, type ToolCall, answer } from "./service";
import { requestSettings, setSystemPrompt, showDefaults, systemPrompt } from "./settings";
import { showStart } from "./start";
import { save } from "./store";
import { type Actions, AnswerView, editArticle, userArticle } from "./turns";

const SAVE_MS = 2000; // time between saves of an answer that grows
const log = field("log");
const prompt = field<HTMLTextAreaElement>("prompt");

let model: Model | null = null;
let served: string[] = [];
let conversation: Conversation | null = null;
let edited: Turn | null = null;
let running: AbortController | null = null;

const isChat = (): boolean => Boolean(model?.has_chat_template);

export function setModel(next: Model | null, names: string[]): void {
  const isOther = next?.id !== model?.id;
  model = next;
  served = names;
  setFeaturesOf(next);
  showDefaults();
  if (isOther && next && conversation && conversation.model !== next.id) {
    // A conversation whose model is gone goes on with another one; otherwise another model begins anew.
    if (!served.includes(conversation.model) && conversation.isChat === isChat()) conversation.model = next.id;
    else startAnew();
  }
  const chat = isChat();
  field("mode").textContent = model && !chat ? "This model has no chat template. It continues your text." : "";
  field("system-field").hidden = !chat;
  log.classList.toggle("continues", !chat); // often code, which needs a fixed-width font
  prompt.placeholder = chat ? "Message" : "Text to continue";
  field("prompt-label").textContent = prompt.placeholder;
  showStart(model, conversation === null, begin);
  showButtons();
}

// Puts an example into the prompt, where the user may change it.
function begin(text: string): void {
  prompt.value = text;
  grow();
  showButtons();
  prompt.focus();
}

function showButtons(): void {
  const isBusy = running !== null;
  field("send").hidden = isBusy;
  field("stop").hidden = !isBusy;
  input("send").disabled = !model || !(prompt.value.trim() || attachments().length);
  input("fresh").disabled = conversation === null;
}

export function startAnew(): void {
  running?.abort();
  conversation = edited = null;
  draw();
  drawList(null);
}

export function openConversation(next: Conversation): void {
  if (conversation?.id === next.id) return;
  running?.abort();
  conversation = next;
  edited = null;
  if (next.isChat) setSystemPrompt(next.system);
  draw();
  log.scrollTop = log.scrollHeight;
  drawList(next.id);
}

export const opened = (): Conversation | null => conversation;

// Keeps the end visible, unless the user has scrolled up.
function follow(change: () => void): void {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function siblingActions(of: Conversation, turn: Turn): Actions {
  const siblings = siblingsOf(of, turn);
  if (siblings.length < 2) return {};
  const show = (at: number): void => {
    if (running) return;
    choose(of, siblings[at]!);
    void save(of);
    draw();
  };
  return { siblings: { at: siblings.indexOf(turn), count: siblings.length, show } };
}

function edit(turn: Turn): void {
  if (running) return;
  edited = turn;
  draw();
  log.querySelector<HTMLElement>(".editor")?.focus();
}

function answerActions(of: Conversation, turn: Turn, asked: Turn | undefined): Actions {
  const actions: Actions = { ...siblingActions(of, turn), retry: () => retry(of, turn), branch: () => void branch(of, turn) };
  const isLast = of.leaf === turn.id;
  if (isLast && turn.isCut && (turn.text || turn.thoughts) && !turn.calls?.length) actions.resume = () => void ask(of, turn);
  if (isLast && turn.calls?.length) actions.answerCalls = (results) => answerCalls(of, turn, results);
  if (!of.isChat && asked) actions.edit = () => edit(asked);
  return actions;
}

// Draws the path of the conversation; returns the view of the last answer.
function draw(): AnswerView | null {
  let last: AnswerView | null = null;
  const of = conversation;
  const path = of ? pathOf(of) : [];
  showStart(model, of === null, begin);
  const articles = path.flatMap((turn, at) => {
    if (turn === edited) return [editArticle(turn, (text) => resend(of!, turn, text), cancelEdit)];
    if (turn.role !== "assistant") return of!.isChat ? [userArticle(turn, { ...siblingActions(of!, turn), edit: () => edit(turn) })] : [];
    const asked = path[at - 1];
    if (!of!.isChat && asked === edited) return [];
    last = new AnswerView(of!.isChat ? null : asked ? contentOf(asked) : "");
    last.article.dataset["turn"] = turn.id;
    if (running && turn.id === of!.leaf) last.show(turn, false);
    else last.finish(turn, answerActions(of!, turn, asked));
    return [last.article];
  });
  follow(() => log.replaceChildren(...articles));
  showButtons();
  return last;
}

function cancelEdit(): void {
  edited = null;
  draw();
  prompt.focus();
}

// Adds the parts of calls to functions, which arrive in pieces.
function addCalls(calls: ToolCall[], deltas: Delta["calls"]): void {
  for (const { index, id, function: called } of deltas) {
    const call = (calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (id) call.id = id;
    call.function.name += called?.name ?? "";
    call.function.arguments += called?.arguments ?? "";
  }
}

// Adds a piece of an answer to its turn. `thoughtMs`: the time since its first piece.
function addDelta(turn: Turn, { text, thoughts, calls }: Delta, thoughtMs: number): void {
  if (thoughts) {
    turn.thoughts = (turn.thoughts ?? "") + thoughts;
    turn.thoughtsMs = thoughtMs;
  } else if (turn.thoughts && !turn.text && !turn.calls?.length) turn.thoughtsMs = thoughtMs; // they end with the first piece of the answer
  turn.text += text;
  if (calls.length) addCalls((turn.calls ??= []), calls);
}

// Receives an answer into a turn; draws it at most once per frame.
async function receive(of: Conversation, turn: Turn, deltas: AsyncIterable<Delta>, view: AnswerView | null): Promise<void> {
  const timing: Timing = { begun: performance.now(), first: 0, end: 0, usage: null, finish: null, isStopped: false };
  let frame = 0;
  let saved = timing.begun;
  const drawText = (): void => {
    frame = 0;
    follow(() => view?.show(turn, false));
  };
  try {
    for await (const delta of deltas) {
      if (delta.text || delta.thoughts || delta.calls.length) {
        timing.end = performance.now();
        timing.first ||= timing.end;
        addDelta(turn, delta, timing.end - timing.first);
        frame ||= requestAnimationFrame(drawText);
        if (timing.end - saved > SAVE_MS) {
          saved = timing.end;
          void save(of);
        }
      }
      timing.finish ??= delta.finish;
      timing.usage ??= delta.usage;
    }
  } catch (error) {
    if (isAbort(error)) timing.isStopped = true;
    else turn.error = messageOf(error);
  }
  cancelAnimationFrame(frame);
  turn.isCut = timing.isStopped || Boolean(turn.error) || timing.finish === "length" || timing.finish === "abort";
  turn.figures = figuresOf(timing);
}

// Asks for the text of an answer: all of it, or what follows the text that is there.
async function ask(of: Conversation, turn: Turn): Promise<void> {
  const settings = requestSettings(of.isChat);
  if (!model || running || !settings) return;
  edited = null;
  const own = new AbortController();
  running = own;
  turn.isCut = true; // until its end has come
  delete turn.error;
  if (!turn.text) {
    delete turn.schema;
    const schema = schemaOf(settings);
    if (schema !== undefined) turn.schema = schema;
  }
  of.model = model.id;
  if (of.isChat) of.system = systemPrompt();
  void save(of);
  const view = draw();
  log.scrollTop = log.scrollHeight;
  drawList(of.id);
  const asked = of.turns[turn.parent ?? ""];
  const begun = of.isChat ? turn.text : (asked ? contentOf(asked) : "") + turn.text;
  const deltas = answer({ model: model.id, settings, begun, thoughts: turn.thoughts ?? "", ...(of.isChat ? { messages: messagesOf(of, turn.parent) } : {}) }, own.signal);
  await receive(of, turn, deltas, view);
  if (running === own) running = null;
  await save(of);
  drawList();
  if (conversation !== of) return; // another conversation was opened in the meantime
  follow(() => view?.finish(turn, answerActions(of, turn, asked)));
  const calls = (turn.calls ?? []).map((call) => `The model calls ${call.function.name}.`);
  field("said").textContent = turn.error ? `Error: ${turn.error}` : [turn.text, ...calls].filter(Boolean).join(" ");
  showButtons();
  // The user waits for the answer, which asks for results.
  if (document.activeElement === prompt && !prompt.value && turn.calls?.length) view?.article.querySelector<HTMLElement>(".results textarea")?.focus();
}

function askBelow(of: Conversation, parent: Turn): void {
  void ask(of, addTurn(of, parent.id, { role: "assistant", text: "" }));
}

// Settings that are not valid are shown before a turn is added.
const isReady = (of: Conversation | null): boolean => Boolean(model) && !running && requestSettings(of?.isChat ?? isChat()) !== null;

function retry(of: Conversation, turn: Turn): void {
  const asked = of.turns[turn.parent ?? ""];
  if (!asked || !isReady(of)) return;
  if (!turn.text && !turn.calls?.length) delete of.turns[turn.id]; // a failed answer is replaced
  askBelow(of, asked);
}

async function branch(of: Conversation, turn: Turn): Promise<void> {
  const next = branchAt(of, turn);
  await save(next);
  openConversation(next);
  prompt.focus();
}

function answerCalls(of: Conversation, turn: Turn, results: string[]): void {
  if (!isReady(of)) return;
  let parent = turn;
  results.forEach((text, at) => {
    const { id, function: called } = turn.calls![at]!;
    parent = addTurn(of, parent.id, { role: "tool", text, callId: id, callName: called.name });
  });
  askBelow(of, parent);
}

function contentsOf({ id, parent, created, ...contents }: Turn): Omit<Turn, "id" | "parent" | "created"> {
  return contents;
}

function resend(of: Conversation, turn: Turn, text: string): void {
  if ((!text.trim() && !turn.attachments?.length && turn.role !== "tool") || !isReady(of)) return;
  const path = pathOf(of);
  let added = addTurn(of, turn.parent, { ...contentsOf(turn), text });
  // The results of the other calls stay as they are.
  const behind = turn.role === "tool" ? path.slice(path.indexOf(turn) + 1) : [];
  for (const other of behind) {
    if (other.role !== "tool") break;
    added = addTurn(of, added.id, contentsOf(other));
  }
  askBelow(of, added);
  prompt.focus();
}

function send(): void {
  const text = prompt.value;
  const files = attachments();
  if (conversation && conversation.isChat !== isChat()) startAnew();
  if ((!text.trim() && !files.length) || !isReady(conversation)) return;
  prompt.value = "";
  setAttachments([]);
  grow();
  conversation ??= newConversation(model!.id, isChat());
  const turn = addTurn(conversation, conversation.leaf, { role: "user", text, ...(files.length ? { attachments: files } : {}) });
  askBelow(conversation, turn);
}

function grow(): void {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

export function startChat(): void {
  field("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  prompt.addEventListener("input", () => {
    grow();
    showButtons();
  });
  field("stop").addEventListener("click", () => {
    running?.abort();
    prompt.focus();
  });
  field("fresh").addEventListener("click", () => {
    startAnew();
    prompt.focus();
  });
  addEventListener("pagehide", () => {
    if (running && conversation) void save(conversation);
  });
  startAttachments(showButtons);
  showButtons();
}
