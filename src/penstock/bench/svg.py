"""What the pictures of several commands have in common."""

from __future__ import annotations

from html import escape

__all__ = ["outlined"]


def outlined(x: float, y: float, text: str, style: str, width: int) -> str:
    """A label that lines end around: its outline in white, and itself over it.

    One element with ``paint-order`` would do where SVG 2 is read; other readers draw the outline over the label.
    """
    at = f"x='{x:.1f}' y='{y:.1f}' {style}"
    stroke = f"stroke='white' stroke-width='{width}' stroke-linejoin='round' aria-hidden='true'"
    return f"<text {at} {stroke}>{escape(text)}</text>\n<text {at}>{escape(text)}</text>"
