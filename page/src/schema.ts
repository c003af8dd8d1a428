// Whether a JSON schema of the service's description allows a value: as far as the values need that the page sends.

import type { Description } from "./service";

const MAX_DEPTH = 16;
const isObject = (value: unknown): value is Record<string, unknown> => typeof value === "object" && value !== null && !Array.isArray(value);
const listOf = (value: unknown): unknown[] => (Array.isArray(value) ? value : [value]);

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

// Keywords that are not known here allow everything.
export function allows(schema: unknown, value: unknown, description: Description, depth = 0): boolean {
  if (schema === false) return false;
  if (!isObject(schema) || depth > MAX_DEPTH) return true;
  const fits = (part: unknown, item: unknown = value): boolean => allows(part, item, description, depth + 1);
  const ref = schema["$ref"];
  if (typeof ref === "string" && !fits(description.components.schemas[ref.split("/").pop()!])) return false;
  if ("type" in schema && !hasType(value, schema["type"])) return false;
  if ("const" in schema && !isSame(schema["const"], value)) return false;
  if (Array.isArray(schema["enum"]) && !schema["enum"].some((item) => isSame(item, value))) return false;
  if ("not" in schema && fits(schema["not"])) return false;
  for (const name of ["anyOf", "oneOf"]) {
    const parts = schema[name];
    if (Array.isArray(parts) && !parts.some((part) => fits(part))) return false;
  }
  if (Array.isArray(schema["allOf"]) && !schema["allOf"].every((part) => fits(part))) return false;
  if (Array.isArray(value)) {
    if (typeof schema["maxItems"] === "number" && value.length > schema["maxItems"]) return false;
    return !("items" in schema) || value.every((item) => fits(schema["items"], item));
  }
  if (isObject(value)) {
    const { properties, required, additionalProperties, maxProperties } = schema;
    const known = isObject(properties) ? properties : {};
    if (Array.isArray(required) && required.some((name) => !(String(name) in value))) return false;
    if (typeof maxProperties === "number" && Object.keys(value).length > maxProperties) return false;
    return Object.entries(value).every(([name, item]) => (name in known ? fits(known[name], item) : additionalProperties === undefined || fits(additionalProperties, item)));
  }
  return true;
}
