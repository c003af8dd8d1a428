// Sets formulas. KaTeX builds nodes, not markup, because the content security policy permits no style attributes.
import katex from "katex";

export function renderMath(place: HTMLElement, tex: string, isDisplay: boolean): void {
  katex.render(tex, place, { displayMode: isDisplay, throwOnError: false, strict: "ignore", maxExpand: 500, maxSize: 20 });
}
