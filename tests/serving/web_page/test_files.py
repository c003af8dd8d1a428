"""The files of the page: what they are built from, how many bytes they cost, and the policy that they come with."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zlib
from importlib.resources import files
from pathlib import Path

import pytest

from tests.support.http_service import until
from tests.support.web_page_actions import ask

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "page"
MAX_BYTES = 600_000


PAGES = {"/": "index.html", "/docs": "docs.html"}


def served_paths(page: str) -> list[str]:
    """Return the paths of a page and of its files; those of /docs are named after it."""
    names = [one.name for one in files("penstock.serving").joinpath("web_page").iterdir() if one.name != "licences.txt"]
    own = [name for name in names if name.startswith("docs.") == (page == "/docs") and name not in PAGES.values()]
    return [page, *(f"/page/{name}" for name in own)]


@pytest.mark.parametrize("page", PAGES)
def test_the_files_of_a_page_are_under_600_kilobytes(serve, page):
    service = serve()
    total = 0
    for path in served_paths(page):
        status, headers, data = service.ask("GET", path, headers={"Accept-Encoding": "gzip"})
        assert status == 200, path
        is_font = path.endswith(".woff2")
        assert headers.get("content-encoding") == (None if is_font else "gzip"), path
        if not is_font:
            assert zlib.decompress(data, 31) == service.ask("GET", path)[2], path
        total += len(data)
    assert total < MAX_BYTES


@pytest.mark.long
def test_a_visit_costs_less_than_600_kilobytes(serve, visit, script):
    """A conversation with code and formulas, and the charts."""
    page = visit(serve("fake").url)
    sizes: list[float] = []
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    page.reload()
    script(page, "```python\ndef f(): pass\n```\n\n$\\mathbb{R}$ and $$\\sum_i \\mathbf{x}_i$$")
    ask(page, "How?")
    until(lambda: page.locator(".hljs-keyword").count() and page.locator(".katex").count())
    page.click("#show-live")
    page.locator(".uplot").first.wait_for()
    page.evaluate("document.fonts.ready")
    assert 150_000 < sum(sizes) < MAX_BYTES


def test_the_policy_permits_nothing_inline(serve):
    service = serve()
    for path in ("/", "/page/main.js", "/page/KaTeX_Main-Regular.woff2"):
        policy = service.ask("GET", path)[1]["content-security-policy"]
        assert "unsafe" not in policy
        assert "http" not in policy
        assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "font-src 'self'"} <= set(
            policy.split("; ")
        )
    html = service.ask("GET", "/")[2].decode()
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script>", html)


def test_the_lock_file_names_no_place() -> None:
    text = (SOURCES / "package-lock.json").read_text()
    packages = json.loads(text)["packages"]
    assert not [name for name, one in packages.items() if "resolved" in one]
    assert not [name for name, one in packages.items() if name and "integrity" not in one]


def test_every_library_has_a_line_in_the_documents() -> None:
    package = json.loads((SOURCES / "package.json").read_text())
    text = (ROOT / "docs" / "dependencies.md").read_text()
    for name in [*package["dependencies"], *package["devDependencies"]]:
        assert re.search(rf"^\| {re.escape(name)} ", text, re.MULTILINE), name


@pytest.mark.long
def test_the_built_files_are_what_the_sources_give(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm not found; install Node.js 20 or later")
    copy = tmp_path / "page"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("node_modules"))
    done = subprocess.run(
        ["npm", "ci", "--prefer-offline"], cwd=copy, capture_output=True, text=True, check=False, timeout=300
    )
    if re.search(r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|ENOTCACHED", done.stderr):
        pytest.skip(f"npm cannot reach its registry: {done.stderr[:200]}")
    assert done.returncode == 0, done.stderr
    subprocess.run(["npx", "tsc", "--noEmit"], cwd=copy, check=True, timeout=300)
    subprocess.run(["node", "build.mjs", str(tmp_path / "built")], cwd=copy, check=True, timeout=300)
    built = {path.name: path.read_bytes() for path in (tmp_path / "built").iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "src/penstock/serving/web_page").iterdir()}
    assert built.keys() == committed.keys()
    assert [name for name in built if built[name] != committed[name]] == [], "run make page"
