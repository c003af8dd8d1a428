"""Servables on the page, in a real browser: a method is tried, and the live view shows what runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
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


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("servables")
    for version in "12":
        (folder / "notes" / version).mkdir(parents=True)
    (folder / "notes" / "servable.py").write_text(SERVABLE)
    command = [sys.executable, "-m", "penstock", "serve", str(folder), "--port", "0", "--log", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield re.search(r"http://\S+", process.stdout.readline())[0]
    finally:
        process.terminate()
        process.communicate(timeout=SECONDS)


def answer(page) -> str:
    page.locator("#method-run:enabled").wait_for()
    page.evaluate("document.getElementById('method-answer').textContent = ''")
    page.click("#method-run")
    until(lambda: page.inner_text("#method-answer"))
    return page.inner_text("#method-answer")


def test_a_method_is_tried(url, visit):
    page = visit(url)
    page.locator("#methods:visible").wait_for()  # there is nobody to talk to
    page.locator("#method-run:enabled").wait_for()
    assert page.locator("#method option").all_inner_texts() == ["notes.read, version 1", "notes.read, version 2"]
    assert "text BYTES[n], x FP32[n, 2]" in page.inner_text("#method-takes")
    assert json.loads(page.input_value("#method-inputs")) == {"text": ["text"], "x": [[0, 0]]}
    assert answer(page) == 'label BYTES[1]: ["TEXT"]\ntwice FP32[1, 2]: [0,0]'
    assert "ms" in page.inner_text("#method-time")
    page.fill("#method-inputs", '{"text": ["a", "b"], "x": [[1, 2.5], [3, 4]]}')
    assert answer(page) == 'label BYTES[2]: ["A","B"]\ntwice FP32[2, 2]: [2,5,6,8]'
    page.select_option("#method", index=1)
    page.locator("#method-run:enabled").wait_for()
    assert json.loads(page.input_value("#method-inputs")) == {"text": ["text"], "x": [[0, 0]]}
    page.select_option("#method", index=0)  # what was written is kept
    until(lambda: "2.5" in page.input_value("#method-inputs"))


def test_what_does_not_fit_is_said(url, visit):
    page = visit(url)
    for given, words in (
        ('{"text": ["a"], "x": [[1', "Invalid JSON"),
        ('{"text": ["a"]}', "x"),
        ('{"text": ["a"], "x": [[1, 2, 3]]}', "x: expected the shape"),
        ('{"text": ["a"], "x": [[-1, 0]]}', "must not be below 0"),
    ):
        page.locator("#method-run:enabled").wait_for()
        page.fill("#method-inputs", given)
        assert words in answer(page)
        assert page.locator("#method-answer.error").count() == 1


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
