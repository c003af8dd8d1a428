// Whether a value follows a JSON schema: as far as the service's description and the schemas of answers need.

const MAX_DEPTH = 64;
type Schema = Record<string, unknown>;
const isObject = (value: unknown): value is Schema => typeof value === "object" && value !== null && !Array.isArray(value);
const listOf = (value: unknown): unknown[] => (Array.isArray(value) ? value : [value]);
const short = (value: unknown): string => {
  const text = JSON.stringify(value) ?? String(value);
  return text.length > 40 ? `${text.slice(0, 39)}\u2026` : text;
};

function typeOf(value: unknown): string {
  if (value === null) return "null";
  return Array.isArray(value) ? "array" : typeof value;
}

// Equal as JSON; the order of an object's members does not matter to the short values of an enum.
const isSame = (one: unknown, other: unknown): boolean => JSON.stringify(one) === JSON.stringify(other);

function hasType(value: unknown, type: unknown): boolean {
  const own = typeOf(value);
  return listOf(type).some((name) => name === own || (name === "integer" && Number.isInteger(value)));
}

// Returns the part of a document that a reference names; true, which allows everything, if it is elsewhere.
function partOf(root: unknown, ref: string): unknown {
  if (!ref.startsWith("#")) return true;
  let part = root;
  for (const name of decodeURIComponent(ref.slice(1)).split("/").slice(1)) {
    const key = name.replaceAll("~1", "/").replaceAll("~0", "~");
    part = typeof part === "object" && part !== null ? (part as Schema)[key] : undefined;
  }
  return part ?? true;
}

// The keywords that compare with a number, each with the part of a value that it is about.
const LIMITS: Record<string, { of: (value: unknown) => number | null; fits: (part: number, limit: number) => boolean; words: string }> = {};
const numberOf = (value: unknown): number | null => (typeof value === "number" ? value : null);
const lengthOf = (value: unknown): number | null => (typeof value === "string" ? [...value].length : null);
const itemsOf = (value: unknown): number | null => (Array.isArray(value) ? value.length : null);
const membersOf = (value: unknown): number | null => (isObject(value) ? Object.keys(value).length : null);
for (const [names, of, unit] of [
  [["minimum", "maximum"], numberOf, ""],
  [["minLength", "maxLength"], lengthOf, " characters"],
  [["minItems", "maxItems"], itemsOf, " items"],
  [["minProperties", "maxProperties"], membersOf, " members"],
] as const) {
  LIMITS[names[0]] = { of, fits: (part, limit) => part >= limit, words: `at least LIMIT${unit}` };
  LIMITS[names[1]] = { of, fits: (part, limit) => part <= limit, words: `at most LIMIT${unit}` };
}
LIMITS["exclusiveMinimum"] = { of: numberOf, fits: (part, limit) => part > limit, words: "more than LIMIT" };
LIMITS["exclusiveMaximum"] = { of: numberOf, fits: (part, limit) => part < limit, words: "less than LIMIT" };

function breaksLimit(schema: Schema, value: unknown): string | null {
  for (const [name, { of, fits, words }] of Object.entries(LIMITS)) {
    const [limit, part] = [schema[name], of(value)];
    if (typeof limit === "number" && part !== null && !fits(part, limit)) return `expected ${words.replace("LIMIT", String(limit))}, got ${part}`;
  }
  const pattern = schema["pattern"];
  if (typeof pattern === "string" && typeof value === "string") {
    try {
      if (!new RegExp(pattern, "u").test(value)) return `expected a match of ${pattern}`;
    } catch {
      // an expression that this browser cannot read is not checked
    }
  }
  return null;
}

// Returns where and how a value breaks a schema, and null if it does not. Keywords that are not known here allow everything.
// `root` is the document of the schema, to which its references lead; `at` is the place of the value in the whole.
export function mismatch(schema: unknown, value: unknown, root: unknown, at = "", depth = 0): string | null {
  const place = at ? `${at}: ` : "";
  if (schema === false) return `${place}not allowed`;
  if (!isObject(schema) || depth > MAX_DEPTH) return null;
  const inner = (part: unknown, item: unknown = value, where = at): string | null => mismatch(part, item, root, where, depth + 1);
  const fits = (part: unknown): boolean => inner(part) === null;
  const ref = schema["$ref"];
  const referred = typeof ref === "string" ? inner(partOf(root, ref)) : null;
  if (referred !== null) return referred;
  if ("type" in schema && !hasType(value, schema["type"])) return `${place}expected ${listOf(schema["type"]).join(" or ")}, got ${short(value)}`;
  if ("const" in schema && !isSame(schema["const"], value)) return `${place}expected ${short(schema["const"])}, got ${short(value)}`;
  if (Array.isArray(schema["enum"]) && !schema["enum"].some((item) => isSame(item, value))) return `${place}expected one of ${short(schema["enum"])}, got ${short(value)}`;
  if ("not" in schema && fits(schema["not"])) return `${place}${short(value)} is excluded`;
  for (const name of ["anyOf", "oneOf"]) {
    const parts = schema[name];
    if (Array.isArray(parts) && !parts.some(fits)) return parts.length === 1 ? inner(parts[0]) : `${place}${short(value)} fits no alternative of ${name}`;
  }
  for (const part of listOf(schema["allOf"] ?? [])) if (!fits(part)) return inner(part);
  const limit = breaksLimit(schema, value);
  if (limit !== null) return `${place}${limit}`;
  if (Array.isArray(value)) {
    const first: unknown[] = Array.isArray(schema["prefixItems"]) ? schema["prefixItems"] : [];
    for (const [index, item] of value.entries()) {
      const found = inner(index < first.length ? first[index] : schema["items"], item, `${at}[${index}]`);
      if (found !== null) return found;
    }
  }
  return isObject(value) ? memberMismatch(schema, value, at, inner) : null;
}

function memberMismatch(schema: Schema, value: Schema, at: string, inner: (part: unknown, item: unknown, where: string) => string | null): string | null {
  const { properties, required, additionalProperties } = schema;
  const known = isObject(properties) ? properties : {};
  const missing = Array.isArray(required) ? required.find((name) => !(String(name) in value)) : undefined;
  if (missing !== undefined) return `${at ? `${at}: ` : ""}${missing} is missing`;
  for (const [name, item] of Object.entries(value)) {
    const found = inner(name in known ? known[name] : additionalProperties, item, at ? `${at}.${name}` : name);
    if (found !== null) return found;
  }
  return null;
}
