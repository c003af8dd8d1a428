// Numbers as people read them, and the figures under an answer.

import type { Usage } from "./service";

const format = new Intl.NumberFormat("en");
export const number = (value: number): string => format.format(value);

// A number per second; one above 0 does not read as 0.
export function rate(value: number): string {
  if (value <= 0 || value >= 10) return number(Math.round(value));
  return value < 0.05 ? "<0.1" : value.toFixed(1);
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
  if (value < 0.9995) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 90) return `${value.toFixed(1)} s`;
  if (value < 5400) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

export interface Timing {
  begun: number; // times in ms
  first: number; // 0 before the first delta
  end: number;
  usage: Usage | null;
  finish: string | null;
  isStopped: boolean;
}

const MIN_MS = 50; // minimum time between the first and the last delta for a rate; below it, deltas arrived together
const REASONS: Record<string, string> = { length: "stopped at max tokens", abort: "stopped by the server" };

// The rate covers the tokens after the first, or all tokens if they arrived together.
export function figuresOf({ begun, first, end, usage, finish, isStopped }: Timing): string[] {
  const words: string[] = [];
  const count = usage?.completion_tokens ?? 0;
  const rate = (tokens: number, ms: number): string => (tokens / (ms / 1000)).toFixed(1);
  if (count > 1 && end - first >= MIN_MS) words.push(`${rate(count - 1, end - first)} tokens/s`);
  else if (count && end > begun) words.push(`${rate(count, end - begun)} tokens/s overall`);
  if (first) words.push(`first token after ${((first - begun) / 1000).toFixed(2)} s`);
  if (usage) {
    words.push(`${number(count)} ${count === 1 ? "token" : "tokens"}`);
    const shared = usage.prompt_tokens_details?.cached_tokens;
    words.push(`${number(usage.prompt_tokens)} prompt tokens${shared ? ` (${number(shared)} cached)` : ""}`);
  }
  if (isStopped) words.push("stopped");
  else if (finish && REASONS[finish]) words.push(REASONS[finish]);
  return words;
}
