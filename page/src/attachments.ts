// Text files that are attached to the message under composition: chosen, dropped or pasted.

import type { Attachment } from "./conversation";
import { field, iconButton, input, make, messageOf } from "./dom";
import { number } from "./figures";

const MAX_BYTES = 1 << 20;
let files: Attachment[] = [];
let onChange: () => void = () => {};

export const attachments = (): Attachment[] => files;

async function read(file: File): Promise<Attachment> {
  if (file.size > MAX_BYTES) throw new Error(`${file.name}: expected a text file of at most ${number(MAX_BYTES)} bytes, got ${number(file.size)}`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // see below
  }
  throw new Error(`${file.name}: expected a text file in UTF-8`);
}

export function sizeOf(numBytes: number): string {
  if (numBytes < 1024) return `${numBytes} B`;
  return numBytes < 1 << 20 ? `${(numBytes / 1024).toFixed(1)} KiB` : `${(numBytes / (1 << 20)).toFixed(1)} MiB`;
}

export function setAttachments(next: Attachment[]): void {
  files = next;
  field("attach-error").textContent = "";
  const chips = files.map((file) => {
    const name = make("span", { class: "chip-name" }, file.name);
    return make("li", { class: "chip" }, name, make("span", { class: "dim" }, sizeOf(file.text.length)), iconButton("close", `Remove ${file.name}`, () => setAttachments(files.filter((one) => one !== file))));
  });
  field("files").replaceChildren(...chips);
  field("files").hidden = !files.length;
  onChange();
}

async function add(chosen: Iterable<File>): Promise<void> {
  const errors: string[] = [];
  for (const file of chosen) {
    try {
      setAttachments([...files, await read(file)]);
    } catch (error) {
      errors.push(messageOf(error));
    }
  }
  field("attach-error").textContent = errors.join("\n");
}

export function startAttachments(changed: () => void): void {
  onChange = changed;
  const chooser = input("attach-file");
  field("attach").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", async () => {
    await add([...(chooser.files ?? [])]);
    chooser.value = "";
    field("prompt").focus();
  });
  const place = field("talk");
  place.addEventListener("dragover", (event) => {
    if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
  });
  place.addEventListener("drop", (event) => {
    if (!event.dataTransfer?.files.length) return;
    event.preventDefault();
    void add([...event.dataTransfer.files]);
  });
  field("prompt").addEventListener("paste", (event) => {
    if (!event.clipboardData?.files.length) return;
    event.preventDefault();
    void add([...event.clipboardData.files]);
  });
}
