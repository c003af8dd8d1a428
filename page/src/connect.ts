// The view that connects other programs: snippets with the service's address and the model.

import { copyButton, field, make } from "./dom";
import { MarkdownView } from "./markdown";
import { type Model, key } from "./service";

const NO_KEY = "none"; // clients refuse an empty key
const KEY = "YOUR_API_KEY";
const quote = (text: string): string => JSON.stringify(text); // also a string of Python, JavaScript and YAML
const shell = (text: string): string => `'${text.replaceAll("'", "'\\''")}'`;

interface Target {
  url: string; // of the API, with its version
  model: string;
  isChat: boolean;
  key: string;
}

interface Client {
  name: string;
  language: string;
  note: string;
  write: (target: Target) => string;
}

const QUESTION = "What is a mutex?";
const TEXT = "def add(a, b):";

function curl({ url, model, isChat, key }: Target): string {
  const body = JSON.stringify(isChat ? { model, messages: [{ role: "user", content: QUESTION }] } : { model, prompt: TEXT, max_tokens: 64 }, null, 2);
  const head = key === NO_KEY ? "" : `  -H ${shell(`Authorization: Bearer ${key}`)} \\\n`;
  return `curl ${shell(`${url}/${isChat ? "chat/completions" : "completions"}`)} \\\n  -H 'Content-Type: application/json' \\\n${head}  -d ${shell(body)}`;
}

function python({ url, model, isChat, key }: Target): string {
  const begin = `from openai import OpenAI\n\nclient = OpenAI(base_url=${quote(url)}, api_key=${quote(key)})\n`;
  if (!isChat) return `${begin}answer = client.completions.create(model=${quote(model)}, prompt=${quote(TEXT)}, max_tokens=64)\nprint(answer.choices[0].text)`;
  return `${begin}stream = client.chat.completions.create(
    model=${quote(model)},
    messages=[{"role": "user", "content": ${quote(QUESTION)}}],
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)`;
}

function javascript({ url, model, isChat, key }: Target): string {
  const begin = `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: ${quote(url)}, apiKey: ${quote(key)} });\n`;
  if (!isChat) return `${begin}const answer = await client.completions.create({ model: ${quote(model)}, prompt: ${quote(TEXT)}, max_tokens: 64 });\nconsole.log(answer.choices[0].text);`;
  return `${begin}const stream = await client.chat.completions.create({
  model: ${quote(model)},
  messages: [{ role: "user", content: ${quote(QUESTION)} }],
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");`;
}

function langchain({ url, model, isChat, key }: Target): string {
  const name = isChat ? "ChatOpenAI" : "OpenAI";
  const [asked, shown] = isChat ? [QUESTION, "answer.content"] : [TEXT, "answer"];
  return `from langchain_openai import ${name}

model = ${name}(
    model=${quote(model)},
    base_url=${quote(url)},
    api_key=${quote(key)},
)
answer = model.invoke(${quote(asked)})
print(${shown})`;
}

function continueDev({ url, model, isChat, key }: Target): string {
  const roles = isChat ? ["chat", "edit", "apply"] : ["autocomplete"];
  return `name: Penstock
version: 1.0.0
schema: v1
models:
  - name: ${quote(model)}
    provider: openai
    model: ${quote(model)}
    apiBase: ${quote(url)}
    apiKey: ${quote(key)}
    roles:
${roles.map((role) => `      - ${role}`).join("\n")}${isChat ? "" : "\n    useLegacyCompletionsEndpoint: true"}`;
}

const CLIENTS: Client[] = [
  { name: "curl", language: "bash", note: "In a terminal.", write: curl },
  { name: "Python", language: "python", note: "With OpenAI\u2019s client: pip install openai", write: python },
  { name: "JavaScript", language: "javascript", note: "With OpenAI\u2019s client: npm install openai", write: javascript },
  { name: "LangChain", language: "python", note: "With pip install langchain-openai", write: langchain },
  { name: "Continue", language: "yaml", note: "For the editor extension Continue (VS Code, JetBrains): ~/.continue/config.yaml", write: continueDev },
  { name: "Environment", language: "bash", note: "Many programs read these variables.", write: ({ url, key }) => `export OPENAI_BASE_URL=${shell(url)}\nexport OPENAI_API_KEY=${shell(key)}` },
];

let model: Model | null = null;
let chosen = 0;
let drawn = "";

function targetOf({ id, has_chat_template }: Model): Target {
  const url = new URL("v1", document.baseURI.replace(/[?#].*$/, "")).href;
  return { url, model: id, isChat: Boolean(has_chat_template), key: key() === null ? NO_KEY : KEY };
}

const copied = (label: string, text: string): (Node | string)[] => [make("code", {}, text), copyButton(`Copy ${label}`, () => text)];

// The panel is only drawn anew if it has changed, because the user may have selected a part of it.
export function showConnect(next: Model | null): void {
  model = next;
  field("connect-panel").hidden = !model;
  if (!model) {
    drawn = "";
    return;
  }
  const target = targetOf(model);
  const words = JSON.stringify([target, chosen]);
  if (words === drawn) return;
  drawn = words;
  field("connect-url").replaceChildren(...copied("base URL", target.url));
  field("connect-model").replaceChildren(...copied("model name", target.model));
  field("connect-key").textContent = target.key === NO_KEY ? `not required; clients that need one take any, such as \u201c${NO_KEY}\u201d` : `required; put yours in place of ${KEY}`;
  const client = CLIENTS[chosen]!;
  const text = make("div", { class: "text" });
  new MarkdownView(text).show(`\`\`\`\`${client.language}\n${client.write(target)}\n\`\`\`\``, true);
  field("connect-panel").replaceChildren(make("p", { class: "dim" }, client.note), text);
  field("connect-panel").setAttribute("aria-labelledby", `client-${chosen}`);
}

function choose(at: number): void {
  chosen = at;
  [...field("connect-tabs").children].forEach((tab, index) => {
    tab.setAttribute("aria-selected", String(index === at));
    (tab as HTMLElement).tabIndex = index === at ? 0 : -1;
  });
  showConnect(model);
}

export function startConnect(): void {
  const tabs = CLIENTS.map(({ name }, at) => {
    const tab = make("button", { type: "button", role: "tab", id: `client-${at}`, "aria-controls": "connect-panel" }, name);
    tab.addEventListener("click", () => choose(at));
    return tab;
  });
  field("connect-tabs").replaceChildren(...tabs);
  field("connect-tabs").addEventListener("keydown", ({ key: pressed }) => {
    if (pressed !== "ArrowRight" && pressed !== "ArrowLeft") return;
    choose((chosen + (pressed === "ArrowRight" ? 1 : -1) + CLIENTS.length) % CLIENTS.length);
    tabs[chosen]!.focus();
  });
  choose(0);
}
