// Shows a text as Markdown: tables, code with its language and a copy button, formulas. HTML in the text is shown as text.

import DOMPurify from "dompurify";
import { Marked, type TokenizerAndRendererExtension, type Tokens } from "marked";
import { copyButton, make } from "./dom";

type Loaded<T> = { module: T | null; wanted: Promise<void> | null };
const code: Loaded<typeof import("./code.js")> = { module: null, wanted: null };
const math: Loaded<typeof import("./math.js")> = { module: null, wanted: null };

// Loads a library with its first use. If that fails, the text stays as it is.
function withLibrary<T>(library: Loaded<T>, load: () => Promise<T>, act: (module: T) => void): void {
  if (library.module) return act(library.module);
  library.wanted ??= load().then((module) => void (library.module = module));
  library.wanted.then(() => library.module && act(library.module)).catch(() => (library.wanted = null));
}

const escapeHtml = (text: string): string => text.replace(/[&<>"]/g, (one) => `&#${one.charCodeAt(0)};`);

const MATH_START = /\$|\\\(|\\\[/;
const MATH_INLINE = [
  { rule: /^\$\$([^$]+?)\$\$/, isDisplay: true },
  { rule: /^\\\[([\s\S]+?)\\\]/, isDisplay: true },
  { rule: /^\\\(([\s\S]+?)\\\)/, isDisplay: false },
  { rule: /^\$(?![\s$])((?:\\.|[^\\$\n])+?)(?<!\s)\$(?![\d$])/, isDisplay: false }, // not the dollars of "$5 and $10"
];
const MATH_BLOCK = [/^\$\$([\s\S]+?)\$\$[ \t]*(?:\n|$)/, /^\\\[([\s\S]+?)\\\][ \t]*(?:\n|$)/];

const renderer = (token: Tokens.Generic): string => `<span class="math${token["isDisplay"] ? " display" : ""}">${escapeHtml(token["tex"])}</span>`;

const inlineMath: TokenizerAndRendererExtension = {
  name: "math",
  level: "inline",
  start: (source) => source.match(MATH_START)?.index,
  tokenizer(source) {
    for (const { rule, isDisplay } of MATH_INLINE) {
      const match = rule.exec(source);
      if (match) return { type: "math", raw: match[0], tex: match[1]!.trim(), isDisplay };
    }
    return undefined;
  },
  renderer,
};
const blockMath: TokenizerAndRendererExtension = {
  name: "mathBlock",
  level: "block",
  start: (source) => source.match(/^(?:\$\$|\\\[)/m)?.index,
  tokenizer(source) {
    for (const rule of MATH_BLOCK) {
      const match = rule.exec(source);
      if (match) return { type: "mathBlock", raw: match[0], tex: match[1]!.trim(), isDisplay: true };
    }
    return undefined;
  },
  renderer: (token) => `<p>${renderer(token)}</p>`,
};

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions: [inlineMath, blockMath],
  tokenizer: {
    html: () => undefined,
    tag: () => undefined,
  },
  renderer: {
    code: ({ text, lang }) => `<pre><code class="language-${escapeHtml((lang ?? "").match(/^[\w+#.-]*/)![0])}">${escapeHtml(text)}</code></pre>`,
    // The page loads nothing from other hosts, so a picture is a link.
    image: ({ href, text }) => `<a href="${escapeHtml(href)}">${escapeHtml(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "\u2611 " : "\u2610 "),
  },
});

const TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "span", "strong", "table",
  "tbody", "td", "th", "thead", "tr", "ul",
];
const ALLOWED = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["align", "class", "href", "start", "title"], ADD_URI_SAFE_ATTR: ["align", "start"], ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i };

const clean = (html: string): DocumentFragment => DOMPurify.sanitize(html, { ...ALLOWED, RETURN_DOM_FRAGMENT: true });

const MAX_HIGHLIGHTED = 100_000; // characters
const MAX_GROWING = 8_000; // characters of a block that is highlighted again and again while it grows

function highlightInto(inner: HTMLElement, text: string, language: string, maxChars: number): void {
  if (!language || text.length > maxChars) return;
  withLibrary(code, () => import("./code.js"), ({ highlight }) => {
    const markup = highlight(text, language);
    if (markup !== null) inner.replaceChildren(clean(markup));
  });
}

// Appends code in a language, without a frame.
export function showCode(place: HTMLElement, text: string, language: string): void {
  const inner = make("code", {}, text);
  place.append(make("pre", { tabindex: 0 }, inner));
  highlightInto(inner, text, language, MAX_HIGHLIGHTED);
}

function decorateCode(pre: HTMLPreElement, isGrowing: boolean): void {
  const inner = pre.firstElementChild as HTMLElement;
  const text = inner.textContent ?? "";
  const language = inner.className.replace(/^language-/, "");
  const label = make("span", {}, language || "text");
  const block = make("div", { class: "code" }, make("div", { class: "code-head" }, label, copyButton("Copy code", () => text)));
  pre.replaceWith(block);
  pre.tabIndex = 0;
  block.append(pre);
  highlightInto(inner, text, language, isGrowing ? MAX_GROWING : MAX_HIGHLIGHTED);
}

function decorate(fragment: DocumentFragment, isGrowing: boolean): void {
  for (const pre of fragment.querySelectorAll("pre")) decorateCode(pre, isGrowing);
  for (const table of fragment.querySelectorAll("table")) {
    const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(scroll);
    scroll.append(table);
  }
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const place of fragment.querySelectorAll<HTMLElement>(".math")) {
    const tex = place.textContent ?? "";
    withLibrary(math, () => import("./math.js"), ({ renderMath }) => renderMath(place, tex, place.classList.contains("display")));
  }
}

interface Block {
  key: string;
  nodes: ChildNode[];
}

// A text that may grow. Blocks that have not changed keep their nodes, and so the reader's selection.
export class MarkdownView {
  #blocks: Block[] = [];

  constructor(readonly place: HTMLElement) {}

  show(text: string, isComplete: boolean): void {
    const tokens = marked.lexer(text);
    const keys = tokens.map(({ raw }, at) => (at === tokens.length - 1 && !isComplete ? `growing ${raw}` : raw));
    let kept = 0;
    while (kept < this.#blocks.length && this.#blocks[kept]!.key === keys[kept]) kept += 1;
    for (const { nodes } of this.#blocks.splice(kept)) for (const node of nodes) node.remove();
    for (let at = kept; at < tokens.length; at += 1) {
      const fragment = clean(marked.parser([tokens[at]!]));
      decorate(fragment, keys[at] !== tokens[at]!.raw);
      this.#blocks.push({ key: keys[at]!, nodes: [...fragment.childNodes] });
      this.place.append(fragment);
    }
  }
}
