// A model's text on the page: as it is, but for fenced code.  Never as HTML.

const FENCE = /^```.*$/;

// Parts { code, text } of an answer; a fence that is still open is code.
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

// `given`: what the person wrote and the model continues.
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
