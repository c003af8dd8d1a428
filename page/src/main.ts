// The page: its views, the list of models, and the updates of both.

import { openConversation, opened, setModel, startAnew, startChat } from "./chat";
import { showConnect, startConnect } from "./connect";
import { field, messageOf, setIcon, store, stored } from "./dom";
import { lookForFeatures, startFeatures } from "./features";
import { askForKey } from "./key_dialog";
import { draw as drawList, showList, startList } from "./list";
import { UPDATE_MS, knowPast, record, redrawCharts, showLive } from "./live";
import { methodsOf, setMethods, startMethods } from "./methods";
import { type Model, ServiceError, getStatus, onKeyWanted } from "./service";
import { showPanel, startSettings } from "./settings";
import { openStore } from "./store";

const IDLE_MS = 10000; // time between updates while the status view is hidden
const VIEWS = ["talk", "methods", "live", "connect"] as const;
type View = (typeof VIEWS)[number];
const isView = (name: string): name is View => (VIEWS as readonly string[]).includes(name);

let models: Model[] = [];
let view: View | "" = "";
let timer = 0;
let isLooking = false;

function notice(words: string): void {
  const line = field("notice");
  if (line.textContent !== words) line.textContent = words;
  line.hidden = !words;
}

const select = field<HTMLSelectElement>("model");
const chosen = (): Model | null => models.find(({ id }) => id === select.value) ?? null;
function choose(): void {
  setModel(chosen(), models.map(({ id }) => id));
  showConnect(chosen());
}

// The list is only replaced if it has changed, because the user may have it open.
function showModels(next: Model[]): void {
  const label = ({ id, state }: Model): string => (state === "ready" ? id : `${id} (${state})`);
  const isChanged = next.map(label).join("\n") !== models.map(label).join("\n");
  const before = select.value;
  models = next;
  if (isChanged) {
    select.replaceChildren(...next.map((model) => new Option(label(model), model.id)));
    if (next.some(({ id }) => id === before)) select.value = before;
    else select.value = next.find(({ state }) => state === "ready")?.id ?? next[0]?.id ?? "";
    if (!next.length) select.append(new Option("No model", ""));
    select.disabled = !next.length;
  }
  choose();
}

async function look(): Promise<void> {
  clearTimeout(timer);
  if (isLooking) return;
  isLooking = true;
  let isAgain = true;
  try {
    const status = await getStatus();
    showModels(status.models);
    const methods = methodsOf(status);
    setMethods(methods);
    field("show-methods").hidden = !methods.length && view !== "methods";
    if (!view) show(!models.length && methods.length ? "methods" : "talk");
    record(status);
    if (view === "live") {
      await knowPast();
      showLive(status);
    }
    notice("");
  } catch (error) {
    notice(messageOf(error));
    isAgain = !(error instanceof ServiceError && error.status === 401); // without a key, ask again only after an action of the user
  }
  isLooking = false;
  if (isAgain && !document.hidden) timer = window.setTimeout(look, view === "live" ? UPDATE_MS : IDLE_MS);
}

function show(next: View): void {
  view = next;
  document.body.dataset["view"] = next;
  for (const name of VIEWS) {
    field(name).hidden = name !== next;
    field(`show-${name}`).setAttribute("aria-pressed", String(name === next));
  }
  const hash = next === "talk" ? "" : `#${next}`;
  if (location.hash !== hash) history.replaceState(null, "", hash || location.pathname);
  void look();
}

const THEMES = ["system", "light", "dark"] as const;
const THEME_ICONS = { system: "system", light: "sun", dark: "moon" } as const;

function showTheme(): void {
  const theme = THEMES.find((name) => name === document.documentElement.dataset["theme"]) ?? "system";
  setIcon(field("theme"), THEME_ICONS[theme], `Theme: ${theme}`);
}

function nextTheme(): void {
  const root = document.documentElement;
  const at = THEMES.findIndex((name) => name === root.dataset["theme"]);
  const next = THEMES[(Math.max(at, 0) + 1) % THEMES.length]!;
  if (next === "system") delete root.dataset["theme"];
  else root.dataset["theme"] = next;
  store("penstock-theme", next === "system" ? "" : next);
  showTheme();
  redrawCharts();
}

const isNarrow = matchMedia("(max-width: 56rem)");

// On a narrow screen, one of the two panels lies over the chat.
function toggle(id: "list" | "panel", isOpen = Boolean(field(id).hidden)): void {
  if (isOpen && id === "panel") lookForFeatures();
  if (isOpen && isNarrow.matches) (id === "list" ? showPanel : showList)(false);
  (id === "list" ? showList : showPanel)(isOpen);
  if (!isNarrow.matches) store(`penstock-${id}`, String(isOpen));
  if (isOpen) field(id).querySelector<HTMLElement>("input, textarea")?.focus();
  else field(`show-${id}`).focus();
}

function startPanels(): void {
  setIcon(field("show-list"), "list", "Conversations");
  setIcon(field("show-panel"), "settings", "Settings");
  setIcon(field("fresh"), "plus", "New conversation");
  setIcon(field("attach"), "attach", "Attach text files");
  for (const id of ["list", "panel"] as const) {
    setIcon(field(`close-${id}`), "close", "Close");
    field(`show-${id}`).addEventListener("click", () => toggle(id));
    field(`close-${id}`).addEventListener("click", () => toggle(id, false));
    field(id).addEventListener("keydown", (event) => {
      if (event.key === "Escape") toggle(id, false);
    });
  }
  field("talk").querySelector("main")!.addEventListener("pointerdown", () => {
    if (!isNarrow.matches) return;
    showList(false);
    showPanel(false);
  });
  if (isNarrow.matches) return;
  showList(stored("penstock-list") !== "false");
  if (stored("penstock-panel") === "true") {
    showPanel(true);
    lookForFeatures();
  }
}

onKeyWanted(askForKey);
showTheme();
field("theme").addEventListener("click", nextTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);
startPanels();
startSettings();
startFeatures(() => toggle("panel", true));
startList({
  open(conversation) {
    openConversation(conversation);
    if (models.some(({ id }) => id === opened()?.model)) select.value = conversation.model;
    choose();
    if (isNarrow.matches) showList(false);
  },
  removed(id) {
    if (id === null || id === opened()?.id) startAnew();
    drawList();
  },
});
startChat();
startConnect();
startMethods();
select.addEventListener("change", choose);
for (const name of VIEWS) field(`show-${name}`).addEventListener("click", () => show(name));
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) void look();
});
void openStore(() => drawList()).then(() => drawList());
const asked = location.hash.slice(1);
if (isView(asked)) show(asked);
else void look(); // which shows what there is
if ((!asked || asked === "talk") && matchMedia("(pointer: fine)").matches) field("prompt").focus();
