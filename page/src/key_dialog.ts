// The dialog that asks for the API key.

import { field, input } from "./dom";

// Resolves to null if the user cancels.
export function askForKey(isWrong: boolean): Promise<string | null> {
  const dialog = field<HTMLDialogElement>("key-dialog");
  field("key-wrong").hidden = !isWrong;
  input("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok" ? input("key").value : null), { once: true });
  });
}
