// Tensors of the Open Inference Protocol: requests with JSON and bytes, and responses whose outputs are bytes.

export interface Tensor {
  name: string;
  datatype: string;
  shape: number[];
  values: ArrayLike<number | bigint | boolean> | Uint8Array[]; // BYTES: one array of bytes per element
}

export interface Input {
  name: string;
  datatype: string;
  shape: number[];
  data: unknown; // nested lists; elements of BYTES may be Uint8Array
}

export function shapeOf(data: unknown): number[] {
  const shape: number[] = [];
  for (let at = data; Array.isArray(at); at = at[0]) shape.push(at.length);
  return shape;
}

// Encodes elements of BYTES: each has its length in front, in 4 bytes.
function encodeBytes(elements: (string | Uint8Array)[]): Uint8Array<ArrayBuffer> {
  const parts = elements.map((one) => (typeof one === "string" ? new TextEncoder().encode(one) : one));
  const all = new Uint8Array(parts.reduce((sum, part) => sum + 4 + part.length, 0));
  let at = 0;
  for (const part of parts) {
    new DataView(all.buffer).setUint32(at, part.length, true);
    all.set(part, at + 4);
    at += 4 + part.length;
  }
  return all;
}

// Returns the two parts of a request's body. Bytes that are not text follow the JSON.
export function bodyOf(inputs: Input[]): [string, Blob] {
  const binary: Uint8Array<ArrayBuffer>[] = [];
  const heads = inputs.map(({ data, ...head }) => {
    const elements = Array.isArray(data) ? data.flat(16) : [];
    if (!elements.some((one) => one instanceof Uint8Array)) return { ...head, data };
    const bytes = encodeBytes(elements);
    binary.push(bytes);
    return { ...head, parameters: { binary_data_size: bytes.length } };
  });
  return [JSON.stringify({ inputs: heads, parameters: { binary_data_output: true } }), new Blob(binary)];
}

// Converts the bits of FP16 to a number (IEEE 754).
function half(bits: number): number {
  const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 0) return sign * 2 ** -14 * (fraction / 1024);
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * 2 ** (exponent - 15) * (1 + fraction / 1024);
}

const DECODERS: Record<string, (data: ArrayBuffer) => Tensor["values"]> = {
  BOOL: (data) => Array.from(new Uint8Array(data), Boolean),
  UINT8: (data) => new Uint8Array(data),
  UINT16: (data) => new Uint16Array(data),
  UINT32: (data) => new Uint32Array(data),
  UINT64: (data) => new BigUint64Array(data),
  INT8: (data) => new Int8Array(data),
  INT16: (data) => new Int16Array(data),
  INT32: (data) => new Int32Array(data),
  INT64: (data) => new BigInt64Array(data),
  FP16: (data) => Array.from(new Uint16Array(data), half),
  BF16: (data) => new Float32Array(Uint32Array.from(new Uint16Array(data), (bits) => bits << 16).buffer),
  FP32: (data) => new Float32Array(data),
  FP64: (data) => new Float64Array(data),
  BYTES(data) {
    const elements: Uint8Array[] = [];
    for (let at = 0; at < data.byteLength; ) {
      const length = new DataView(data).getUint32(at, true);
      elements.push(new Uint8Array(data, at + 4, length));
      at += 4 + length;
    }
    return elements;
  },
};

export function outputsOf(json: string, binary: ArrayBuffer): Tensor[] {
  let at = 0;
  return JSON.parse(json).outputs.map(({ name, datatype, shape, parameters }: any) => {
    const end = at + parameters.binary_data_size;
    const values = DECODERS[datatype]!(binary.slice(at, end));
    at = end;
    return { name, datatype, shape, values };
  });
}

const DIGITS: Record<string, number> = { FP16: 4, BF16: 3, FP32: 7 };
const MAX_BYTES_SHOWN = 32;

function textOf(bytes: Uint8Array): string {
  try {
    return JSON.stringify(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch {
    const digits = Array.from(bytes.subarray(0, MAX_BYTES_SHOWN), (byte) => byte.toString(16).padStart(2, "0"));
    return `${bytes.length} bytes: ${digits.join(" ")}${bytes.length > MAX_BYTES_SHOWN ? " \u2026" : ""}`;
  }
}

// Writes values as nested lists, at most `most` of them.
export function listOf({ datatype, shape, values }: Tensor, most: number): string {
  const digits = DIGITS[datatype];
  const one = (value: number | bigint | boolean | Uint8Array): string => {
    if (value instanceof Uint8Array) return textOf(value);
    return typeof value === "number" && digits && Number.isFinite(value) ? String(Number(value.toPrecision(digits))) : String(value);
  };
  let left = most;
  const level = (dim: number, at: number, count: number): string => {
    const size = shape[dim] ?? 0;
    const parts: string[] = [];
    for (let index = 0; index < size && left > 0; index += 1) {
      if (dim === shape.length - 1) {
        parts.push(one(values[at + index]!));
        left -= 1;
      } else parts.push(level(dim + 1, at + (index * count) / size, count / size));
    }
    return `[${parts.join(dim === shape.length - 1 ? ", " : `,\n${" ".repeat(dim + 1)}`)}${parts.length < size ? ", \u2026" : ""}]`;
  };
  return shape.length ? level(0, 0, values.length) : one(values[0]!);
}
