"""The view that connects other programs: its snippets run as they are shown."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import yaml

from penstock.serving.settings import GatewaySettings
from tests.support.web_page_actions import ask

pytestmark = pytest.mark.long

NAME = 'it\'s "a" model/v1.0'
KEY = "a-key-that-is-long-enough-for-the-service"
WAIT_MS = 30_000


def snippet(page, client: str) -> str:
    page.click(f"#connect-tabs >> text='{client}'")
    page.locator("#connect-panel[aria-labelledby]").wait_for()
    return page.inner_text("#connect-panel pre")


def test_snippets_run_as_they_are_shown(serve, visit):
    service = serve(NAME)
    page = visit(service.url, permissions=["clipboard-read", "clipboard-write"])
    page.context.set_default_timeout(WAIT_MS)
    page.locator("#model:enabled").wait_for()
    page.click("#show-connect")
    assert page.inner_text("#connect-url") == f"{service.url}/v1"
    assert page.inner_text("#connect-model") == NAME
    python = snippet(page, "Python")
    page.click("#connect-panel .copy")
    page.locator("#connect-panel [aria-label=Copied]").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == python
    run = {"capture_output": True, "text": True, "check": True, "timeout": 4 * WAIT_MS / 1000}
    assert subprocess.run([sys.executable, "-c", python], **run).stdout.strip()
    if shutil.which("curl"):
        answer = subprocess.run(["bash", "-c", snippet(page, "curl")], **run).stdout
        assert json.loads(answer)["model"] == NAME
    model = yaml.safe_load(snippet(page, "Continue"))["models"][0]
    assert (model["model"], model["apiBase"]) == (NAME, f"{service.url}/v1")
    assert f"ChatOpenAI(\n    model={json.dumps(NAME)},\n" in snippet(page, "LangChain")
    assert f"baseURL: {json.dumps(f'{service.url}/v1')}" in snippet(page, "JavaScript")
    page.focus("#connect-tabs [aria-selected=true]")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "LangChain"


def test_a_key_is_named_and_never_shown(serve, visit, tmp_path):
    (tmp_path / "keys").write_text(f"{KEY}\n")
    (tmp_path / "keys").chmod(0o600)
    page = visit(serve("fake", settings=GatewaySettings(keys_file=tmp_path / "keys")).url)
    page.context.set_default_timeout(WAIT_MS)
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    page.locator("#model:enabled").wait_for()
    ask(page, "cat")
    page.click("#show-connect")
    assert "Authorization: Bearer YOUR_API_KEY" in snippet(page, "curl")
    for client in page.locator("#connect-tabs button").all_inner_texts():
        assert KEY not in snippet(page, client)
