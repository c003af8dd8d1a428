// Short forms for work with elements.

export type Child = Node | string;
export type Attributes = Record<string, string | number | boolean>;

export function field<T extends HTMLElement = HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found as T;
}

export const input = (id: string): HTMLInputElement => field<HTMLInputElement>(id);

function setAttributes(element: Element, attributes: Attributes): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false) element.setAttribute(name, String(value));
  }
}

export function make<K extends keyof HTMLElementTagNameMap>(name: K, attributes: Attributes = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const element = document.createElement(name);
  setAttributes(element, attributes);
  element.append(...children);
  return element;
}

// Outlines on a grid of 24 units.
const ICONS = {
  attach: "M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.4 3.4 0 0 1 4.8 4.8l-8.3 8.3a1.7 1.7 0 0 1-2.4-2.4L14.5 7.4",
  branch: "M6 4v16M6 15c0-5 12-2 12-8M18 7V4M15.5 6L18 3.5 20.5 6",
  check: "M5 12.5l4.5 4.5L19 7.5",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  list: "M4 7h16M4 12h16M4 17h16",
  moon: "M20 14.5A8 8 0 0 1 9.5 4 8 8 0 1 0 20 14.5z",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  next: "M9 5l7 7-7 7",
  plus: "M12 5v14M5 12h14",
  previous: "M15 5l-7 7 7 7",
  resume: "M7 5v14l11-7z",
  retry: "M4 12a8 8 0 1 1 2.5 5.8M4 19v-4.5h4.5",
  settings: "M4 7h9M19 7h1M16 4.5v5M4 17h1M11 17h9M8 14.5v5",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M5.3 18.7l1.4-1.4M17.3 6.7l1.4-1.4",
  system: "M4 5h16v11H4zM9 20h6M12 16v4",
  tool: "M14.5 6.5a4 4 0 0 0-5.2 5.2L4 17l3 3 5.3-5.3a4 4 0 0 0 5.2-5.2l-2.5 2.5-2.5-.5-.5-2.5z",
} as const;
export type Icon = keyof typeof ICONS;

export function icon(name: Icon): SVGElement {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  setAttributes(svg, { viewBox: "0 0 24 24", "aria-hidden": "true" });
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export function setIcon(button: HTMLElement, name: Icon, label: string): void {
  button.replaceChildren(icon(name));
  button.setAttribute("aria-label", label);
  button.title = label;
}

export function iconButton(name: Icon, label: string, act: () => void): HTMLButtonElement {
  const button = make("button", { type: "button", class: `icon ${name}` });
  setIcon(button, name, label);
  button.addEventListener("click", act);
  return button;
}

export function textButton(label: string, act: () => void): HTMLButtonElement {
  const button = make("button", { type: "button" }, label);
  button.addEventListener("click", act);
  return button;
}

// A button that copies a text; the icon tells that it has been copied.
export function copyButton(label: string, text: () => string): HTMLButtonElement {
  const button = iconButton("copy", label, async () => {
    await copyText(text());
    setIcon(button, "check", "Copied");
    setTimeout(() => setIcon(button, "copy", label), 1500);
  });
  return button;
}

// Pages of plain HTTP on another machine have no clipboard; there a selected field is copied.
async function copyText(text: string): Promise<void> {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", { class: "unseen" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function download(name: string, text: string, type: string): void {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// Asks before something that cannot be undone.
export function confirmed(question: string, verb: string): Promise<boolean> {
  const dialog = field<HTMLDialogElement>("confirm");
  field("confirm-text").textContent = question;
  field("confirm-yes").textContent = verb;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

export const isAbort = (error: unknown): boolean => error instanceof DOMException && error.name === "AbortError";
export const messageOf = (error: unknown): string => (error instanceof Error ? error.message : String(error));

// Storage may be switched off; then values live as long as the page.
export function stored(name: string): string | null {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

export function store(name: string, value: string): void {
  try {
    localStorage.setItem(name, value);
  } catch {
    // see above
  }
}
