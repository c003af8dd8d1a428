"""Servables on the page, in a real browser: a method is tried, and the live view shows what runs it."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator

import pytest

from tests.support.http_service import SECONDS, until

pytestmark = pytest.mark.long

SERVABLE = """
from penstock import servable


@servable.stage(outputs={"label": "TEXT[]", "twice": "FP32[2]"})
def look(text, x):
    if x.sum() < 0:
        raise servable.InputError("x must not be below 0")
    return text.upper(), x * 2


@servable.method(inputs={"text": "TEXT[]", "x": "FP32[2]"}, outputs={"label": "TEXT[]", "twice": "FP32[2]"})
def read(text, x):
    return look(text, x)


servable.settings(versions="all", labels={"stable": 1})
"""
PICTURES = """
from penstock import servable


@servable.stage(outputs={"turned": "UINT8[-1,-1,3]", "grey": "FP16[8,8]", "file": "BYTES[]", "is_large": "BOOL[]"})
def look(picture, raw, file, limit, strict):
    assert raw.shape == (64,) and raw.max() <= 16
    return picture[::-1], raw.reshape(8, 8), file, bool(strict) and picture.mean() > limit


@servable.method(
    inputs={"picture": "UINT8[-1,-1,3]", "raw": "FP32[64]", "file": "BYTES[]", "limit": "INT64[]", "strict": "BOOL[]"},
    outputs={"turned": "UINT8[-1,-1,3]", "grey": "FP16[8,8]", "file": "BYTES[]", "is_large": "BOOL[]"},
)
def turn(picture, raw, file, limit, strict):
    return look(picture, raw, file, limit, strict)
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("servables")
    for version in "12":
        (folder / "notes" / version).mkdir(parents=True)
    (folder / "notes" / "servable.py").write_text(SERVABLE)
    (folder / "pictures" / "1").mkdir(parents=True)
    (folder / "pictures" / "servable.py").write_text(PICTURES)
    command = [sys.executable, "-m", "penstock", "serve", str(folder), "--port", "0", "--log", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield re.search(r"http://\S+", process.stdout.readline())[0]
    finally:
        process.terminate()
        process.communicate(timeout=SECONDS)


def answer(page) -> str:
    page.locator("#method-run:enabled").wait_for()
    page.evaluate("document.getElementById('method-answer').replaceChildren()")
    page.click("#method-run")
    until(lambda: page.inner_text("#method-answer"))
    return page.inner_text("#method-answer")


def png(width: int, height: int, color: tuple[int, int, int]) -> bytes:
    """A picture of one color, but for its first row, which is black."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"\0" + bytes(3 * width) + (b"\0" + bytes(color) * width) * (height - 1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def choose(page, name: str) -> None:
    page.select_option("#method", value=name)
    page.locator("#method-run:enabled").wait_for()


def test_a_method_is_tried(url, visit):
    page = visit(url)
    page.locator("#methods:visible").wait_for()  # no model serves a chat
    page.locator("#method-run:enabled").wait_for()
    assert page.locator("#method option").all_inner_texts()[:2] == ["notes.read, version 1", "notes.read, version 2"]
    assert "text BYTES[n], x FP32[n, 2]" in page.inner_text("#method-takes")
    page.click("#as-json")
    assert json.loads(page.input_value("#method-inputs")) == {"text": ["text"], "x": [[0, 0]]}
    assert answer(page) == 'label BYTES[1]\n["TEXT"]\ntwice FP32[1, 2]\n[[0, 0]]'
    assert "ms" in page.inner_text("#method-time")
    page.fill("#method-inputs", '{"text": ["a", "b"], "x": [[1, 2.5], [3, 4]]}')
    assert answer(page) == 'label BYTES[2]\n["A", "B"]\ntwice FP32[2, 2]\n[[2, 5],\n [6, 8]]'
    page.select_option("#method", index=1)
    page.locator("#method-run:enabled").wait_for()
    assert json.loads(page.input_value("#method-inputs")) == {"text": ["text"], "x": [[0, 0]]}
    page.select_option("#method", index=0)  # what was written is kept
    until(lambda: "2.5" in page.input_value("#method-inputs"))


def test_a_form_is_made_from_the_signature(url, visit):
    page = visit(url)
    page.locator("#method-run:enabled").wait_for()
    page.get_by_label("text BYTES[]").fill("a")
    page.get_by_label("x FP32[2]").fill("1, 2.5")
    assert answer(page).endswith("[[2, 5]]")
    page.click("text=Add an instance")
    page.get_by_label("x FP32[2]").nth(1).fill("[0.1, 4]")
    assert answer(page) == 'label BYTES[2]\n["A", "TEXT"]\ntwice FP32[2, 2]\n[[2, 5],\n [0.2, 8]]'
    page.click("#as-json")
    assert json.loads(page.input_value("#method-inputs")) == {"text": ["a", "text"], "x": [[1, 2.5], [0.1, 4]]}
    page.click("#as-form")
    page.get_by_label("Remove instance 1").click()
    assert answer(page).endswith("[[0.2, 8]]")
    for given, words in (
        ("1, two", 'x: expected numbers, got "two"'),
        ("1, 2, 3", "x: expected the shape"),
        ("-1, 0", "must not be below 0"),
    ):
        page.get_by_label("x FP32[2]").fill(given)
        assert words in answer(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1000, 360])
def test_pictures_go_in_and_come_out(url, visit, tmp_path, scheme, width):
    (tmp_path / "red.png").write_bytes(png(20, 10, (255, 0, 0)))
    page = visit(url, width, 740, color_scheme=scheme)
    page.click("#show-methods")
    choose(page, "pictures.turn 1")
    page.get_by_label("White is").nth(1).fill("16")
    choosers = page.locator("#method-fields input[type=file]")
    for number in range(3):
        choosers.nth(number).set_input_files(tmp_path / "red.png")
    until(lambda: page.locator("#method-fields .preview .picture").count() == 3)
    assert "20 × 10 pixels, 600 numbers" in page.inner_text("#method-fields")
    assert "8 × 8 pixels, 64 numbers" in page.inner_text("#method-fields")
    page.get_by_label("limit INT64[]").fill("70")
    page.get_by_label("strict BOOL[]").check()
    found = answer(page)
    for words in ("turned UINT8[1, 10, 20, 3]", "grey FP16[1, 8, 8]", "file BYTES[1]", "is_large BOOL[1]\n[true]"):
        assert words in found
    assert page.locator("#method-answer canvas").count() == 2
    pixel = "canvas => [...canvas.getContext('2d').getImageData(0, {}, 1, 1).data]"
    turned = page.locator("#method-answer canvas").first
    assert turned.evaluate(pixel.format(0)) == [255, 0, 0, 255]
    assert turned.evaluate(pixel.format(9)) == [0, 0, 0, 255]
    image = page.locator("#method-answer img")
    assert image.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [20, 10]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_what_does_not_fit_is_said(url, visit):
    page = visit(url)
    page.click("#as-json")
    for given, words in (
        ('{"text": ["a"], "x": [[1', "Invalid JSON"),
        ('{"text": ["a"]}', "x"),
        ('{"text": ["a"], "x": [[1, 2, 3]]}', "x: expected the shape"),
        ('{"text": ["a"], "x": [[-1, 0]]}', "must not be below 0"),
    ):
        page.locator("#method-run:enabled").wait_for()
        page.fill("#method-inputs", given)
        assert words in answer(page)
        assert page.locator("#method-answer .error").count() == 1


def test_the_live_view_shows_servables(url, visit):
    page = visit(url)
    page.locator("#method-run:enabled").wait_for()
    answer(page)
    page.click("#show-live")
    until(lambda: "stable: version 1" in page.inner_text("#live"))
    for words in ("notes", "ready", "notes.read", "Processes"):
        assert words in page.inner_text("#live")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_down_only(url, visit, scheme):
    page = visit(url, 320, 600, color_scheme=scheme)
    page.locator("#method-run:enabled").wait_for()
    answer(page)
    for view in ("#show-live", "#show-talk", "#show-methods"):
        page.click(view)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
