import { getStatus, onKeyWanted } from "./service.js";
import { showLive } from "./live.js";
import { startSettings } from "./settings.js";
import { setModel, startTalk } from "./talk.js";

const field = (id) => document.getElementById(id);
const LOOK_MS = 1000; // at the service, while the live view is open
const REST_MS = 10000; // else

let models = [];
let isLive = false;
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

// The list stays as it is while nothing changes in it: a person may have it open.
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
    if (isLive) showLive(status);
    notice("");
  } catch (error) {
    notice(error.message);
    again = error.status !== 401; // who gave no key is asked again when they do something
  }
  looking = false;
  if (again && !document.hidden) timer = setTimeout(look, isLive ? LOOK_MS : REST_MS);
}

function show(live) {
  isLive = live;
  field("talk").hidden = live;
  field("live").hidden = !live;
  field("show-talk").setAttribute("aria-pressed", String(!live));
  field("show-live").setAttribute("aria-pressed", String(live));
  if (location.hash !== "#live" && live) history.replaceState(null, "", "#live");
  if (location.hash === "#live" && !live) history.replaceState(null, "", location.pathname);
  void look();
}

onKeyWanted(askForKey);
startSettings();
startTalk();
field("model").addEventListener("change", () => setModel(chosen()));
field("show-talk").addEventListener("click", () => show(false));
field("show-live").addEventListener("click", () => show(true));
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) void look();
});
show(location.hash === "#live");
if (!isLive && matchMedia("(pointer: fine)").matches) field("prompt").focus();
