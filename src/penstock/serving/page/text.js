// Shows a model's text as plain text and fenced code, never as HTML.

const FENCE = /^```.*$/;

// Returns the parts { code, text } of an answer; an open fence counts as code.
export function partsOf(text) {
  const parts = [];
  let part = { code: false, lines: [] };
  for (const line of text.split("\n")) {
    if (FENCE.test(line)) {
      parts.push(part);
      part = { code: !part.code, lines: [] };
    } else {
      part.lines.push(line);
    }
  }
  parts.push(part);
  return parts.filter(({ lines }) => lines.length).map(({ code, lines }) => ({ code, text: lines.join("\n") }));
}

// `given`: the user's text that the model continues.
export function showText(element, text, given = "") {
  if (given) {
    const before = document.createElement("span");
    before.className = "given";
    before.textContent = given;
    element.replaceChildren(before, document.createTextNode(text));
    return;
  }
  element.replaceChildren(
    ...partsOf(text).map((part) => {
      if (!part.code) return document.createTextNode(part.text);
      const block = document.createElement("pre");
      block.tabIndex = 0;
      block.append(document.createElement("code"));
      block.firstChild.textContent = part.text;
      return block;
    }),
  );
}
