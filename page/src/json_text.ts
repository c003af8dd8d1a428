// JSON as a person reads it: indented, and compared with the schema that was asked for.

import { messageOf } from "./dom";
import { mismatch } from "./schema";

const PARTS = /"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/gs;

// Indents a JSON text, whose numbers and strings stay as they are written. Returns the text itself if it is not JSON.
export function formatJson(text: string): string {
  try {
    JSON.parse(text);
  } catch {
    return text;
  }
  const parts = text.match(PARTS) ?? [];
  let out = "";
  let depth = 0;
  const newLine = (): string => `\n${"  ".repeat(depth)}`;
  parts.forEach((part, at) => {
    const next = parts[at + 1];
    if (part === "{" || part === "[") {
      depth += 1;
      out += next === "}" || next === "]" ? part : part + newLine();
    } else if (part === "}" || part === "]") {
      depth -= 1;
      out += parts[at - 1] === "{" || parts[at - 1] === "[" ? part : newLine() + part;
    } else if (part === ",") out += part + newLine();
    else out += part === ":" ? ": " : part;
  });
  return out;
}

export interface Verdict {
  isGood: boolean;
  words: string;
}

// Says whether a complete answer is JSON that follows a schema.
export function judge(text: string, schema: unknown, isCut: boolean): Verdict {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return { isGood: false, words: isCut ? "Incomplete JSON: the answer was cut. Raise Max tokens and regenerate." : `Not JSON: ${messageOf(error)}` };
  }
  const found = mismatch(schema, value, schema);
  return found === null ? { isGood: true, words: "Valid JSON that follows the schema" } : { isGood: false, words: `Does not follow the schema: ${found}` };
}
