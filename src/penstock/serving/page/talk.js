// The chat view: a conversation if the model has a chat template, otherwise completions of a text.
import { answer } from "./service.js";
import { requestSettings, systemPrompt } from "./settings.js";
import { showText } from "./text.js";

const field = (id) => document.getElementById(id);
const log = field("log");
const prompt = field("prompt");

let model = null; // as in /status
let turns = []; // { role, content } of a chat
let running = null; // AbortController
let last = null; // the request that "Regenerate" repeats

const isChat = () => Boolean(model?.has_chat_template);

export function setModel(next) {
  const changed = next?.id !== model?.id;
  model = next;
  if (changed) startAnew();
  const chat = isChat();
  field("mode").textContent = model && !chat ? "This model has no chat template. It continues your text." : "";
  field("system-field").hidden = !chat;
  log.classList.toggle("continues", !chat); // often code, which needs a fixed-width font
  prompt.placeholder = chat ? "Message" : "Text to continue";
  field("prompt-label").textContent = prompt.placeholder;
  log.dataset.empty = model ? (chat ? "Ask anything. Enter sends, Shift+Enter starts a new line." : "Enter the beginning of a text.") : "";
  showButtons();
}

function showButtons() {
  const busy = running !== null;
  field("send").hidden = busy;
  field("stop").hidden = !busy;
  field("send").disabled = !model || !prompt.value.trim();
  field("again").disabled = busy || !last;
  field("fresh").disabled = !log.firstChild;
}

function startAnew() {
  running?.abort();
  turns = [];
  last = null;
  log.replaceChildren();
  showButtons();
}

function addArticle(kind, label) {
  const article = document.createElement("article");
  article.className = kind;
  article.setAttribute("aria-label", label);
  const text = document.createElement("div");
  text.className = "text";
  article.append(text);
  log.append(article);
  return article;
}

// Keeps the end visible, unless the user has scrolled up.
function follow(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function addFoot(article, words, text) {
  const foot = document.createElement("div");
  foot.className = "foot";
  const figures = document.createElement("span");
  figures.textContent = words.join(" \u00b7 ");
  foot.append(figures);
  if (text && navigator.clipboard) {
    const copy = document.createElement("button");
    copy.type = "button";
    copy.textContent = "Copy";
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    });
    foot.append(copy);
  }
  article.append(foot);
}

function addError(article, message) {
  const line = document.createElement("p");
  line.className = "error";
  line.textContent = message;
  article.append(line);
}

const MIN_MS = 50; // minimum time between the first and the last delta for a rate; below it, deltas arrived together

const REASONS = { length: "stopped at max tokens", abort: "stopped by the server" };

// Returns the figures under an answer. The rate covers the tokens after the first, or all tokens if they arrived together.
function figuresOf({ begun, first, end, usage, finish, stopped }) {
  const words = [];
  const count = usage?.completion_tokens;
  const rate = (number, ms) => (number / (ms / 1000)).toFixed(1);
  if (count > 1 && end - first >= MIN_MS) words.push(`${rate(count - 1, end - first)} tokens/s`);
  else if (count && end > begun) words.push(`${rate(count, end - begun)} tokens/s overall`);
  if (first) words.push(`first token after ${((first - begun) / 1000).toFixed(2)} s`);
  if (count !== undefined) words.push(`${count} ${count === 1 ? "token" : "tokens"}`);
  const shared = usage?.prompt_tokens_details?.cached_tokens;
  if (usage) words.push(`${usage.prompt_tokens} prompt tokens${shared ? ` (${shared} cached)` : ""}`);
  if (stopped) words.push("stopped");
  else if (REASONS[finish]) words.push(REASONS[finish]);
  return words;
}

// Shows an answer while it grows, at most once per frame, and returns its final state.
async function receive(article, asked, given) {
  const shown = article.querySelector(".text");
  const state = { begun: performance.now(), first: 0, end: 0, usage: null, finish: null, stopped: false, text: "" };
  let frame = 0;
  const draw = () => {
    frame = 0;
    follow(() => showText(shown, state.text, given));
  };
  try {
    for await (const piece of answer({ ...asked, signal: running.signal })) {
      if (piece.text) {
        state.end = performance.now();
        state.first ||= state.end;
        state.text += piece.text;
        frame ||= requestAnimationFrame(draw);
      }
      state.finish ??= piece.finish;
      state.usage ??= piece.usage;
    }
  } catch (error) {
    if (error.name === "AbortError") state.stopped = true;
    else state.error = error.message;
  }
  cancelAnimationFrame(frame);
  draw();
  return state;
}

async function ask(asked, given) {
  const article = addArticle("assistant", "Answer");
  const own = new AbortController();
  article.classList.add("waits");
  running = own;
  last = { asked, given };
  showButtons();
  log.scrollTop = log.scrollHeight;
  const state = await receive(article, asked, given);
  article.classList.remove("waits");
  if (running === own) running = null;
  if (!article.isConnected) return; // a new conversation was started in the meantime
  follow(() => {
    if (state.error) addError(article, state.error);
    addFoot(article, figuresOf(state), state.text);
  });
  if (asked.messages) turns = [...asked.messages, { role: "assistant", content: state.text }].filter(isKept);
  field("said").textContent = state.error ? `Error: ${state.error}` : state.text;
  showButtons();
}

// Each turn uses the current system prompt of the settings; empty answers are not sent to the model.
const isKept = (turn) => turn.role !== "system" && turn.content !== "";

function send() {
  const written = prompt.value;
  const settings = requestSettings();
  if (!model || running || !written.trim() || !settings) return;
  prompt.value = "";
  grow();
  if (!isChat()) return void ask({ model: model.id, prompt: written, settings }, written);
  addArticle("user", "You").querySelector(".text").textContent = written;
  const system = systemPrompt();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns, { role: "user", content: written }];
  void ask({ model: model.id, messages, settings }, "");
}

function tryAgain() {
  const settings = requestSettings();
  if (!last || running || !settings) return;
  log.lastElementChild.remove();
  void ask({ ...last.asked, settings }, last.given);
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

export function startTalk() {
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
  field("again").addEventListener("click", tryAgain);
  field("fresh").addEventListener("click", () => {
    startAnew();
    prompt.focus();
  });
  showButtons();
}
