import { getStatus, onKeyWanted } from "./service.js";
import { UPDATE_MS, showLive } from "./live.js";
import { methodsOf, setMethods, startMethods } from "./methods.js";
import { startSettings } from "./settings.js";
import { setModel, startTalk } from "./talk.js";

const field = (id) => document.getElementById(id);
const IDLE_MS = 10000; // time between updates while the status view is hidden

let models = [];
const VIEWS = ["talk", "methods", "live"];
let view = "";
let timer = 0;
let looking = false;

function askForKey(wrong) {
  const dialog = field("key-dialog");
  field("key-wrong").hidden = !wrong;
  field("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok" ? field("key").value : null), { once: true });
  });
}

function notice(words) {
  const line = field("notice");
  if (line.textContent !== words) line.textContent = words;
  line.hidden = !words;
}

const chosen = () => models.find((model) => model.id === field("model").value) ?? null;

// The list is only replaced if it has changed, because the user may have it open.
function showModels(next) {
  const select = field("model");
  const label = ({ id, state }) => (state === "ready" ? id : `${id} (${state})`);
  const changed = next.map(label).join("\n") !== models.map(label).join("\n");
  const before = select.value;
  models = next;
  if (changed) {
    select.replaceChildren(...next.map((model) => new Option(label(model), model.id)));
    if (next.some(({ id }) => id === before)) select.value = before;
    else select.value = next.find(({ state }) => state === "ready")?.id ?? next[0]?.id ?? "";
    if (!next.length) select.append(new Option("No model", ""));
    select.disabled = !next.length;
  }
  setModel(chosen());
}

async function look() {
  clearTimeout(timer);
  if (looking) return;
  looking = true;
  let again = true;
  try {
    const status = await getStatus();
    showModels(status.models);
    const methods = methodsOf(status);
    setMethods(methods);
    field("show-methods").hidden = !methods.length && view !== "methods";
    if (!view) show(!models.length && methods.length ? "methods" : "talk");
    if (view === "live") showLive(status);
    notice("");
  } catch (error) {
    notice(error.message);
    again = error.status !== 401; // without a key, ask again only after an action of the user
  }
  looking = false;
  if (again && !document.hidden) timer = setTimeout(look, view === "live" ? UPDATE_MS : IDLE_MS);
}

function show(next) {
  view = next;
  document.body.dataset.view = next;
  for (const name of VIEWS) {
    field(name).hidden = name !== next;
    field(`show-${name}`).setAttribute("aria-pressed", String(name === next));
  }
  const hash = next === "talk" ? "" : `#${next}`;
  if (location.hash !== hash) history.replaceState(null, "", hash || location.pathname);
  void look();
}

onKeyWanted(askForKey);
startSettings();
startTalk();
startMethods();
field("model").addEventListener("change", () => setModel(chosen()));
for (const name of VIEWS) field(`show-${name}`).addEventListener("click", () => show(name));
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) void look();
});
const asked = location.hash.slice(1);
if (VIEWS.includes(asked)) show(asked);
else void look(); // which shows what there is
if (view !== "live" && matchMedia("(pointer: fine)").matches) field("prompt").focus();
