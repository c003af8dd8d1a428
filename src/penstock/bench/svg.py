"""SVG elements that several charts use."""

from __future__ import annotations

from html import escape

__all__ = ["outlined"]


def outlined(x: float, y: float, text: str, style: str, width: int) -> str:
    """Return a label with a white outline, which separates it from lines below.

    These are two elements, because readers without SVG 2 ignore ``paint-order`` and draw the outline over the label.
    """
    at = f"x='{x:.1f}' y='{y:.1f}' {style}"
    stroke = f"stroke='white' stroke-width='{width}' stroke-linejoin='round' aria-hidden='true'"
    return f"<text {at} {stroke}>{escape(text)}</text>\n<text {at}>{escape(text)}</text>"
