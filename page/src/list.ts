// The list of conversations: search, rename, export, delete.

import { type Conversation, asMarkdown, isFoundBy, readConversations } from "./conversation";
import { confirmed, download, field, iconButton, input, make, messageOf } from "./dom";
import { conversationOf, conversations, isPersistent, remove, removeAll, save } from "./store";

export interface ListActions {
  open: (conversation: Conversation) => void;
  removed: (id: string | null) => void; // null: all
}

let actions: ListActions;
let current: string | null = null;
let renamed: string | null = null; // the conversation whose title is a field
let ofMenu: string | null = null;

const fileName = (title: string, end: string): string => `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50) || "conversation"}.${end}`;

function dateOf(time: number): string {
  const date = new Date(time);
  const isToday = date.toDateString() === new Date().toDateString();
  return date.toLocaleString(undefined, isToday ? { hour: "2-digit", minute: "2-digit", hourCycle: "h23" } : { day: "numeric", month: "short" });
}

async function rename(conversation: Conversation, title: string): Promise<void> {
  renamed = null;
  if (title.trim()) {
    conversation.title = title.trim();
    conversation.isNamed = true;
    await save(conversation);
  }
  draw();
}

function titleField(conversation: Conversation): HTMLInputElement {
  const title = make("input", { type: "text", "aria-label": "Title", maxlength: 200 });
  title.value = conversation.title;
  title.addEventListener("keydown", (event) => {
    if (event.key === "Enter") void rename(conversation, title.value);
    if (event.key !== "Escape") return;
    event.stopPropagation();
    void rename(conversation, "");
  });
  title.addEventListener("blur", () => renamed === conversation.id && void rename(conversation, title.value));
  return title;
}

function openMenu(conversation: Conversation, button: HTMLElement): void {
  ofMenu = conversation.id;
  const menu = field("menu");
  menu.showPopover();
  const { bottom, right } = button.getBoundingClientRect();
  menu.style.top = `${Math.max(0, Math.min(bottom, innerHeight - menu.offsetHeight - 8))}px`;
  menu.style.left = `${Math.max(8, right - menu.offsetWidth)}px`;
  menu.querySelector("button")?.focus();
}

function item(conversation: Conversation): HTMLElement {
  if (conversation.id === renamed) return make("li", {}, titleField(conversation));
  const title = conversation.title || "Untitled";
  const open = make("button", { type: "button", class: "open" }, make("span", { class: "title" }, title), make("span", { class: "dim" }, dateOf(conversation.changed)));
  open.addEventListener("click", () => actions.open(conversation));
  if (conversation.id === current) open.setAttribute("aria-current", "true");
  const more = iconButton("more", `Actions for ${title}`, () => openMenu(conversation, more));
  return make("li", {}, open, more);
}

export function draw(id: string | null = current): void {
  current = id;
  const words = input("search").value.trim().toLowerCase();
  const all = conversations();
  const found = words ? all.filter((one) => isFoundBy(one, words)) : all;
  field("conversations").replaceChildren(...found.map(item));
  let note = "";
  if (!isPersistent()) note = "This browser permits no storage here. Conversations end with the page.";
  else if (!all.length) note = "Conversations are kept in this browser only.";
  else if (!found.length) note = "No conversation contains these words.";
  field("list-note").textContent = note;
  for (const name of ["export-all", "delete-all"]) input(name).disabled = !all.length;
  field("conversations").querySelector<HTMLInputElement>("input")?.select();
}

export function showList(isOpen: boolean): void {
  field("list").hidden = !isOpen;
  field("show-list").setAttribute("aria-expanded", String(isOpen));
}

async function importFile(file: File): Promise<void> {
  try {
    for (const conversation of readConversations(await file.text())) await save(conversation);
    draw();
  } catch (error) {
    field("list-note").textContent = `${file.name}: ${messageOf(error)}`;
  }
}

function startMenu(): void {
  const menu = field("menu");
  const on = (id: string, act: (conversation: Conversation) => unknown): void => {
    field(id).addEventListener("click", () => {
      menu.hidePopover();
      const conversation = ofMenu === null ? undefined : conversationOf(ofMenu);
      if (conversation) void act(conversation);
    });
  };
  on("rename", (conversation) => {
    renamed = conversation.id;
    draw();
  });
  on("export-markdown", (one) => download(fileName(one.title, "md"), asMarkdown(one), "text/markdown"));
  on("export-json", (one) => download(fileName(one.title, "json"), JSON.stringify(one, null, 2), "application/json"));
  on("delete", async (one) => {
    if (!(await confirmed(`Delete \u201c${one.title}\u201d?`, "Delete"))) return;
    await remove(one.id);
    actions.removed(one.id);
  });
}

export function startList(given: ListActions): void {
  actions = given;
  startMenu();
  input("search").addEventListener("input", () => draw());
  field("export-all").addEventListener("click", () => download("conversations.json", JSON.stringify(conversations(), null, 2), "application/json"));
  field("delete-all").addEventListener("click", async () => {
    if (!(await confirmed("Delete all conversations in this browser?", "Delete all"))) return;
    await removeAll();
    actions.removed(null);
  });
  const chooser = input("import-file");
  field("import").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", async () => {
    for (const file of chooser.files ?? []) await importFile(file);
    chooser.value = "";
  });
}
