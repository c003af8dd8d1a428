"""How the page looks: contrast, and controls that can be reached, for tests in a browser."""

from __future__ import annotations

from typing import Any

__all__ = ["check"]

# Texts whose contrast with the ground behind them is below 4.5 : 1 (WCAG 2.2, 1.4.3); disabled controls may.
PALE = """() => {
    const channels = (color) => color.match(/[\\d.]+/g).map(Number);
    const light = (color) => {
        const [r, g, b] = channels(color).map((one) => one / 255).map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const color = getComputedStyle(at).backgroundColor;
            if ((channels(color)[3] ?? 1) === 1) return color;
        }
        return "rgb(255, 255, 255)";
    };
    const found = [];
    for (const element of document.querySelectorAll("body *")) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (!own || element.disabled || element.closest(":disabled") || !element.checkVisibility()) continue;
        const pair = [light(getComputedStyle(element).color), light(ground(element))].sort();
        if ((pair[1] + 0.05) / (pair[0] + 0.05) < 4.5) found.push(element.outerHTML.slice(0, 120));
    }
    return found;
}"""  # noqa: E501
# Controls that a neighbor covers, or that lie outside of the window.
HIDDEN = """() => [...document.querySelectorAll("button, input, select, textarea")].filter((element) => {
    const { left, right, top, bottom, width } = element.getBoundingClientRect();
    if (!width || !element.checkVisibility() || bottom < 0 || top > innerHeight) return false;
    if (left < 0 || right > innerWidth) return true;
    const [x, y] = [(left + right) / 2, (top + bottom) / 2];
    const seen = document.elementFromPoint(x, Math.min(Math.max(y, 0), innerHeight - 1));
    return seen && !element.contains(seen) && !seen.contains(element) && !seen.closest("aside, header");
}).map((element) => element.outerHTML.slice(0, 120))"""


def check(page: Any) -> None:
    """Check that the page scrolls down only, that texts have contrast, and that no control is covered."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    assert page.evaluate(PALE) == []
    assert page.evaluate(HIDDEN) == []
