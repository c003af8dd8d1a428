"""The site of the documents: the generated reference, and the build, in which a broken link is an error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.command import ROOT, environment

GENERATE = (
    "import json, sys; sys.path.insert(0, 'docs'); from generate import hooks; print(json.dumps(hooks.generated()))"
)


class Links(HTMLParser):
    """The addresses that a page loads by itself, and the places that it links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.loaded.append(names.get("src") or "")
        elif tag == "link" and names.get("rel") != "canonical":
            self.loaded.append(names.get("href") or "")


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    """The generated pages by their paths."""
    done = subprocess.run(
        [sys.executable, "-c", GENERATE], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    pages: dict[str, str] = json.loads(done.stdout)
    return pages


@pytest.mark.long
def test_navigation_has_every_generated_page(generated: dict[str, str]) -> None:
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert {path for path in generated if path.endswith(".md")} <= set(listed)


def test_reference_names_commands_metrics_and_codes(generated: dict[str, str]) -> None:
    from penstock.api_errors import CODES
    from penstock.cli.main import COMMANDS
    from penstock.sampling_fields import FIELD_NAMES
    from penstock.serving.http.app import operations

    commands = "".join(text for path, text in generated.items() if path.startswith("reference/cli/"))
    assert all(f"## penstock {name}\n" in commands for name in COMMANDS)
    assert all(f"### {one.method} {one.path}\n" in generated["reference/http.md"] for one in operations())
    assert all(f"| {status} |" in generated["reference/errors.md"] for status in CODES)
    assert "### invalid_value\n" in generated["reference/errors.md"]
    assert all(f"| `{name}` |" in generated["reference/sampling.md"] for name in FIELD_NAMES)
    assert "`vllm:time_to_first_token_seconds`" in generated["reference/metrics.md"]
    assert "`PENSTOCK_CACHE_DIR`" in generated["reference/configuration.md"]
    assert "### ModelInferRequest\n" in generated["reference/grpc.md"]


@pytest.mark.parametrize(
    ("words", "page"),
    [
        (("docker", "podman", "container image"), "guides/kubernetes.md"),
        (("context length", "context window", "max_model_len", "n_ctx"), "guides/serving.md"),
        (("json mode", "structured outputs", "function calling", "tools", "vision", "thinking"), "guides/limits.md"),
        (("gpu", "cuda", "audio", "lora"), "guides/limits.md"),
        (("cors", "http/1.0", "ipv6"), "guides/serving.md"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_what_people_search_for_is_on_a_page(words: tuple[str, ...], page: str) -> None:
    text = (ROOT / "docs" / page).read_text().lower()
    assert [word for word in words if word not in text] == []
    assert page in (ROOT / "mkdocs.yml").read_text()


def test_every_field_of_the_configuration_is_described(generated: dict[str, str]) -> None:
    missing = re.findall(r"^`(\w+)`: .*\n:   No description\.$", generated["reference/configuration.md"], re.MULTILINE)
    assert not missing


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    env = environment(NO_MKDOCS_2_WARNING="1")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", os.fspath(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def pages(site: Path) -> Iterator[Path]:
    return site.rglob("*.html")


@pytest.mark.long
def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    for page in pages(site):
        foreign = [address for address in Links(page.read_text()).loaded if re.match(r"(https?:)?//", address)]
        assert not foreign, f"{page.relative_to(site)} loads {foreign}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text()), style.name
