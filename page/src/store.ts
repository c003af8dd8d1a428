// Keeps conversations in this browser (IndexedDB). Where the browser permits no storage, they live as long as the page.

import type { Conversation } from "./conversation";

const DATABASE = "penstock";
const TABLE = "conversations";

const kept = new Map<string, Conversation>();
let database: IDBDatabase | null = null;
let onChanged: () => void = () => {};
const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel(DATABASE) : null; // to the page in other tabs

function finished<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

const table = (mode: IDBTransactionMode): IDBObjectStore | undefined => database?.transaction(TABLE, mode).objectStore(TABLE);

async function readAll(): Promise<void> {
  const all: Conversation[] = await finished(table("readonly")!.getAll());
  kept.clear();
  for (const conversation of all) kept.set(conversation.id, conversation);
}

// `changed` is called when another tab has changed the conversations.
export async function openStore(changed: () => void): Promise<void> {
  onChanged = changed;
  try {
    const opening = indexedDB.open(DATABASE, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(TABLE, { keyPath: "id" });
    database = await finished(opening);
    await readAll();
  } catch {
    database = null;
  }
  channel?.addEventListener("message", async () => {
    if (!database) return;
    await readAll();
    onChanged();
  });
}

export const isPersistent = (): boolean => database !== null;

// Returns the conversations, the latest first.
export const conversations = (): Conversation[] => [...kept.values()].sort((a, b) => b.changed - a.changed);

export const conversationOf = (id: string): Conversation | undefined => kept.get(id);

async function write(act: (table: IDBObjectStore) => IDBRequest): Promise<void> {
  const place = table("readwrite");
  if (!place) return;
  await finished(act(place));
  channel?.postMessage("changed");
}

export async function save(conversation: Conversation): Promise<void> {
  kept.set(conversation.id, conversation);
  await write((place) => place.put(conversation));
}

export async function remove(id: string): Promise<void> {
  kept.delete(id);
  await write((place) => place.delete(id));
}

export async function removeAll(): Promise<void> {
  kept.clear();
  await write((place) => place.clear());
}
