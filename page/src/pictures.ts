// Pictures as tensors, and tensors as pictures.

import { make } from "./dom";
import type { Tensor } from "./tensors";

export interface Layout {
  height: number; // -1: any
  width: number;
  channels: number;
  isPlanar: boolean; // [channels, height, width], otherwise [height, width, channels]
}

const CHANNELS = [1, 3, 4];
const MIN_SIDE = 6;
const MAX_SIDE = 1024; // of a picture whose size is up to the caller

const isSide = (size: number | undefined): boolean => size !== undefined && (size === -1 || size >= MIN_SIDE);

// Returns how an instance of this shape is a picture; null if it is none.
export function layoutOf(datatype: string, shape: number[]): Layout | null {
  const [a = 0, b = 0, c = 0] = shape;
  if (datatype === "BYTES" || datatype === "BOOL") return null;
  if (shape.length === 1) {
    for (const channels of [1, 3]) {
      const side = Math.sqrt(a / channels);
      if (Number.isInteger(side) && side >= MIN_SIDE) return { height: side, width: side, channels, isPlanar: false };
    }
  }
  if (shape.length === 2 && isSide(a) && isSide(b)) return { height: a, width: b, channels: 1, isPlanar: false };
  if (shape.length === 3 && isSide(a) && isSide(b) && CHANNELS.includes(c)) return { height: a, width: b, channels: c, isPlanar: false };
  if (shape.length === 3 && isSide(b) && isSide(c) && CHANNELS.includes(a)) return { height: b, width: c, channels: a, isPlanar: true };
  return null;
}

const indexOf = ({ channels, isPlanar }: Layout, pixel: number, channel: number, numPixels: number): number => (isPlanar ? channel * numPixels + pixel : pixel * channels + channel);

// Converts a picture to the numbers of a tensor; `black` and `white` are the values at both ends.
export async function numbersOf(file: Blob, layout: Layout, black: number, white: number, isWhole: boolean): Promise<{ numbers: number[]; height: number; width: number }> {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const height = layout.height < 0 ? Math.round(bitmap.height * scale) : layout.height;
  const width = layout.width < 0 ? Math.round(bitmap.width * scale) : layout.width;
  const context = make("canvas", { width, height }).getContext("2d")!;
  context.imageSmoothingQuality = "high";
  if (layout.channels < 4) {
    context.fillStyle = "white"; // behind transparent pictures
    context.fillRect(0, 0, width, height);
  }
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  const { data } = context.getImageData(0, 0, width, height);
  const numPixels = width * height;
  const numbers = new Array<number>(numPixels * layout.channels);
  for (let pixel = 0; pixel < numPixels; pixel += 1) {
    const [red, green, blue, alpha] = data.subarray(4 * pixel, 4 * pixel + 4) as unknown as [number, number, number, number];
    const levels = layout.channels === 1 ? [0.299 * red + 0.587 * green + 0.114 * blue] : [red, green, blue, alpha]; // luma of ITU-R BT.601
    for (let channel = 0; channel < layout.channels; channel += 1) {
      const value = black + ((white - black) * levels[channel]!) / 255;
      numbers[indexOf(layout, pixel, channel, numPixels)] = isWhole ? Math.round(value) : Number(value.toPrecision(6));
    }
  }
  return { numbers, height, width };
}

// Draws numbers as a picture, from black at `low` to white at `high`.
export function canvasOf(numbers: ArrayLike<number>, layout: Layout, low: number, high: number, label: string): HTMLCanvasElement {
  const { height, width, channels } = layout;
  const canvas = make("canvas", { width, height, role: "img", "aria-label": label, class: "picture" });
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(width, height);
  const numPixels = width * height;
  for (let pixel = 0; pixel < numPixels; pixel += 1) {
    for (let channel = 0; channel < 4; channel += 1) {
      const from = channels === 1 && channel < 3 ? 0 : channel;
      const value = from < channels ? numbers[indexOf(layout, pixel, from, numPixels)]! : high;
      image.data[4 * pixel + channel] = high === low ? 0 : (255 * (value - low)) / (high - low);
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

const MAX_PICTURES = 16;
const MAGIC: [string, number[]][] = [
  ["image/png", [0x89, 0x50, 0x4e, 0x47]],
  ["image/jpeg", [0xff, 0xd8, 0xff]],
  ["image/gif", [0x47, 0x49, 0x46, 0x38]],
  ["image/webp", [0x52, 0x49, 0x46, 0x46]],
];

export function typeOf(bytes: Uint8Array): string | null {
  return MAGIC.find(([, magic]) => magic.every((byte, at) => bytes[at] === byte))?.[0] ?? null;
}

export function imageOf(bytes: Uint8Array, type: string, label: string): HTMLImageElement {
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return make("img", { src: `data:${type};base64,${btoa(text)}`, alt: label, class: "picture" });
}

// Returns the pictures in an output, and a note about their scale.
export function picturesOf({ name, datatype, shape, values }: Tensor): { pictures: HTMLElement[]; note: string } {
  if (datatype === "BYTES") {
    const all = (values as Uint8Array[]).slice(0, MAX_PICTURES);
    const pictures = all.flatMap((bytes, at) => {
      const type = typeOf(bytes);
      return type ? [imageOf(bytes, type, `${name} ${at + 1}`)] : [];
    });
    return { pictures, note: "" };
  }
  const layout = shape.length > 2 ? layoutOf(datatype, shape.slice(1)) : null;
  if (!layout) return { pictures: [], note: "" };
  const numbers = Array.from(values as ArrayLike<number | bigint>, Number);
  let [low, high] = [Infinity, -Infinity];
  for (const value of numbers) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (datatype === "UINT8") [low, high] = [0, 255];
  const size = layout.height * layout.width * layout.channels;
  const count = Math.min(shape[0]!, MAX_PICTURES);
  const pictures = Array.from({ length: count }, (_, at) => canvasOf(numbers.slice(at * size, (at + 1) * size), layout, low, high, `${name} ${at + 1}`));
  return { pictures, note: `Black is ${Number(low.toPrecision(4))}, white is ${Number(high.toPrecision(4))}.` };
}
