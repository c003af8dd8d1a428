// A form that is made from the signature of a method: a field for each input of each instance.

import { sizeOf } from "./attachments";
import { iconButton, make, messageOf, textButton } from "./dom";
import { type Layout, canvasOf, imageOf, layoutOf, numbersOf, typeOf } from "./pictures";
import type { TensorSpec } from "./service";
import { type Input, shapeOf } from "./tensors";

const MAX_ZEROS = 256; // longer tensors begin empty
const isWhole = (datatype: string): boolean => /INT/.test(datatype);

// A field of one input of one instance. `value` returns its data as nested lists, and throws if the field cannot be read.
interface Field {
  element: HTMLElement;
  value: () => unknown;
}

const labelOf = ({ name, datatype, shape }: TensorSpec): HTMLElement =>
  make("span", {}, name, make("span", { class: "dim" }, ` ${datatype}[${shape.slice(1).map((size) => (size < 0 ? "any" : size)).join(", ")}]`));

function fileChooser(label: string, accept: string, read: (file: File) => Promise<void>): { button: HTMLElement; chooser: HTMLElement; note: HTMLElement } {
  const chooser = make("input", { type: "file", accept, "aria-label": label, hidden: true });
  const note = make("p", { class: "error", role: "alert" });
  chooser.addEventListener("change", async () => {
    const file = chooser.files?.[0];
    chooser.value = "";
    note.textContent = "";
    if (file) await read(file).catch((error: unknown) => (note.textContent = `${file.name}: ${messageOf(error)}`));
  });
  return { button: textButton(label, () => chooser.click()), chooser, note };
}

// A text, or the bytes of a file.
function bytesField(spec: TensorSpec): Field {
  const area = make("textarea", { rows: 2 });
  area.value = "text";
  let bytes: Uint8Array | null = null;
  const preview = make("div", { class: "preview" });
  const remove = (): void => {
    bytes = null;
    area.hidden = false;
    preview.replaceChildren();
  };
  const { button, chooser, note } = fileChooser("File\u2026", "", async (file) => {
    bytes = new Uint8Array(await file.arrayBuffer());
    area.hidden = true;
    const type = typeOf(bytes);
    const words = make("span", { class: "dim" }, `${file.name}, ${sizeOf(bytes.length)}`);
    preview.replaceChildren(...(type ? [imageOf(bytes, type, file.name)] : []), words, iconButton("close", `Remove ${file.name}`, remove));
  });
  const element = make("div", { class: "input" }, make("label", {}, labelOf(spec), area), preview, button, chooser, note);
  return { element, value: () => bytes ?? area.value };
}

function flagField(spec: TensorSpec): Field {
  const box = make("input", { type: "checkbox" });
  return { element: make("label", { class: "input check" }, box, labelOf(spec)), value: () => box.checked };
}

function numberField(spec: TensorSpec): Field {
  const box = make("input", { type: "number", inputmode: "decimal", step: isWhole(spec.datatype) ? 1 : "any", value: 0 });
  const value = (): number => {
    if (Number.isNaN(box.valueAsNumber)) throw new Error(`${spec.name}: expected a number`);
    return box.valueAsNumber;
  };
  return { element: make("label", { class: "input" }, labelOf(spec), box), value };
}

// Gives a flat list the declared shape, if it has as many elements.
function shaped(flat: unknown[], sizes: number[]): unknown {
  if (sizes.length < 2 || sizes.some((size) => size < 0) || sizes.reduce((a, b) => a * b, 1) !== flat.length) return flat;
  let level = flat;
  for (const size of sizes.slice(1).reverse()) level = Array.from({ length: level.length / size }, (_, at) => level.slice(at * size, (at + 1) * size));
  return level;
}

function listIn(text: string, { name, shape }: TensorSpec): unknown {
  const sizes = shape.slice(1);
  if (text.trim().startsWith("[")) {
    const list = JSON.parse(text);
    return shapeOf(list).length === 1 ? shaped(list, sizes) : list;
  }
  const words = text.split(/[\s,;]+/).filter(Boolean);
  if (!words.length) throw new Error(`${name}: expected numbers, got an empty field`);
  const wrong = words.find((word) => Number.isNaN(Number(word)) && word !== "true" && word !== "false");
  if (wrong !== undefined) throw new Error(`${name}: expected numbers, got ${JSON.stringify(wrong)}`);
  return shaped(words.map((word) => (word === "true" ? true : word === "false" ? false : Number(word))), sizes);
}

function zerosOf({ datatype, shape }: TensorSpec): string {
  const count = shape.slice(1).reduce((product, size) => product * Math.max(size, 1), 1);
  if (datatype === "BYTES") return JSON.stringify(shaped(new Array(Math.min(count, MAX_ZEROS)).fill("text"), shape.slice(1).map((size) => Math.max(size, 1))));
  return count > MAX_ZEROS ? "" : new Array(count).fill(datatype === "BOOL" ? "false" : "0").join(", ");
}

// A picture that fills a field of numbers.
function pictureChooser(spec: TensorSpec, layout: Layout, fill: (value: unknown) => void): HTMLElement[] {
  const [low, high] = [make("input", { type: "number", step: "any", value: 0 }), make("input", { type: "number", step: "any", value: spec.datatype === "UINT8" || isWhole(spec.datatype) ? 255 : 1 })];
  const preview = make("figure", { class: "preview" });
  let last: File | null = null;
  const read = async (file: File): Promise<void> => {
    last = file;
    const [black, white] = [low.valueAsNumber || 0, high.valueAsNumber || 0];
    const { numbers, height, width } = await numbersOf(file, layout, black, white, isWhole(spec.datatype));
    const sizes = spec.shape.length === 2 ? [numbers.length] : layout.isPlanar ? [layout.channels, height, width] : spec.shape.length === 3 ? [height, width] : [height, width, layout.channels];
    fill(shaped(numbers, sizes));
    const mean = numbers.reduce((sum, value) => sum + value, 0) / numbers.length;
    const words = `The tensor: ${width} \u00d7 ${height} pixels, ${numbers.length} numbers, mean ${Number(mean.toPrecision(4))}`;
    preview.replaceChildren(canvasOf(numbers, { ...layout, height, width }, black, white, `Preview of ${spec.name}`), make("figcaption", { class: "dim" }, words));
  };
  const { button, chooser, note } = fileChooser("Picture\u2026", "image/*", read);
  for (const box of [low, high]) box.addEventListener("change", () => last && void read(last));
  const ends = make("div", { class: "line ends" }, button, make("label", {}, "Black is", low), make("label", {}, "White is", high));
  return [ends, chooser, note, preview];
}

function numbersField(spec: TensorSpec): Field {
  const area = make("textarea", { rows: 2, class: "mono", spellcheck: false, placeholder: "Numbers, separated by commas" });
  area.value = zerosOf(spec);
  let filled: unknown = null; // the numbers of a picture, which the field shows only if they are few
  area.addEventListener("input", () => (filled = null));
  const layout = layoutOf(spec.datatype, spec.shape.slice(1));
  const fill = (value: unknown): void => {
    filled = value;
    const flat = (value as unknown[]).flat(3);
    area.value = flat.length > MAX_ZEROS ? "" : flat.join(", ");
    area.placeholder = `${flat.length} numbers of the picture`;
  };
  const element = make("div", { class: "input" }, make("label", {}, labelOf(spec), area), ...(layout ? pictureChooser(spec, layout, fill) : []));
  return { element, value: () => filled ?? listIn(area.value, spec) };
}

function fieldOf(spec: TensorSpec): Field {
  if (spec.shape.length > 1) return numbersField(spec);
  if (spec.datatype === "BYTES") return bytesField(spec);
  return spec.datatype === "BOOL" ? flagField(spec) : numberField(spec);
}

export class MethodForm {
  readonly element = make("div");
  #instances: { element: HTMLElement; fields: Field[] }[] = [];

  constructor(readonly specs: TensorSpec[]) {
    this.#add();
  }

  #add(): void {
    const fields = this.specs.map(fieldOf);
    const added = { fields, element: make("fieldset", {}, make("legend"), ...fields.map(({ element }) => element)) };
    this.#instances.push(added);
    this.#draw();
  }

  #draw(): void {
    const isSeveral = this.#instances.length > 1;
    this.#instances.forEach((instance, at) => {
      const legend = instance.element.querySelector("legend")!;
      legend.replaceChildren(isSeveral ? `Instance ${at + 1}` : "Inputs");
      if (!isSeveral) return;
      legend.append(
        iconButton("close", `Remove instance ${at + 1}`, () => {
          this.#instances.splice(at, 1);
          this.#draw();
        }),
      );
    });
    this.element.replaceChildren(...this.#instances.map(({ element }) => element), textButton("Add an instance", () => this.#add()));
  }

  // Returns the inputs, each a list of instances. Throws if a field cannot be read.
  inputs(): Input[] {
    return this.specs.map(({ name, datatype }, at) => {
      const data = this.#instances.map(({ fields }) => fields[at]!.value());
      return { name, datatype, shape: shapeOf(data), data };
    });
  }
}

