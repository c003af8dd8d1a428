// The page at /docs: Swagger UI over the description that the service gives of itself.

import SwaggerUI from "swagger-ui-dist/swagger-ui-es-bundle.js";
import { field, messageOf } from "./dom";
import { askForKey } from "./key_dialog";
import { getDescription, key, onKeyWanted } from "./service";

// Swagger UI has dark colors of its own, which follow a class of the root element.
const dark = matchMedia("(prefers-color-scheme: dark)");
function applyTheme(): void {
  const { classList, dataset } = document.documentElement;
  classList.toggle("dark-mode", dataset.theme ? dataset.theme === "dark" : dark.matches);
}

// Swagger UI has no headings between the title and those of the groups and schemas, which are of levels 3 and 4.
function setLevels(): void {
  for (const heading of document.querySelectorAll("h3.opblock-tag:not([aria-level]), section.models > h4:not([aria-level])")) {
    heading.setAttribute("role", "heading");
    heading.setAttribute("aria-level", "2");
  }
}

async function show(): Promise<void> {
  const spec = await getDescription();
  const ui = SwaggerUI({
    spec,
    dom_id: "#docs",
    deepLinking: true,
    defaultModelsExpandDepth: 0,
    displayRequestDuration: true,
    tryItOutEnabled: true,
    validatorUrl: null, // no other host is asked
  });
  const used = key();
  if (used) ui.preauthorizeApiKey("key", used);
}

new MutationObserver(setLevels).observe(field("docs"), { childList: true, subtree: true });
onKeyWanted(askForKey);
applyTheme();
dark.addEventListener("change", applyTheme);
show().catch((error: unknown) => {
  field("notice").textContent = messageOf(error);
  field("notice").hidden = false;
});
