"""Pages for files outside docs/ that documents link to, so that the site works without a repository beside it."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".h": "c", ".hpp": "cpp", ".fbs": "proto", ".proto": "protobuf", ".sh": "sh",
             ".yaml": "yaml", ".json": "json", ".c": "c", ".cpp": "cpp", ".inc": "cpp", ".md": "markdown"}  # fmt: skip


def target_of(document: str, link: str) -> str | None:
    """Return the path in the repository of a link that leaves docs/, or None.  ``document``: the linking file."""
    path = os.path.normpath(os.path.join(os.path.dirname(document), link))
    return None if path.startswith(("docs/", "..")) else path


def page_of(path: str) -> str:
    """Return the path in the site of the page for a file or folder of the repository."""
    return "contributing/index.md" if path == "CONTRIBUTING.md" else f"source/{path}.md"


def links_of(document: str, text: str) -> set[str]:
    """Return the files and folders outside docs/ that a document links to."""
    targets = (target_of(document, match[1]) for match in LINK.finditer(text))
    return {path for path in targets if path is not None and (ROOT / path).exists()}


LOG = re.compile(r"\[([^\]]+)\]\((?:[./\w-]*/)?log\.md(?:#[^)\s]*)?\)")
"""A link to the log, which is not in the site."""


def without_log(text: str) -> str:
    """Return a document whose links to the log are text that names the file of the repository."""
    return LOG.sub(r"\1 (`docs/history/log.md`)", text)


def rewritten(document: str, site_path: str, text: str) -> str:
    """Return a document with its links as the site needs them.  ``site_path``: where its page is in the site."""

    def link(match: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(document), match[1]))
        if path.startswith("docs/"):
            path = path.removeprefix("docs/")
        elif (ROOT / path).exists():
            path = page_of(path)
        else:
            return match[0]
        return f"]({os.path.relpath(path, os.path.dirname(site_path) or '.')}{match[2] or ''})"

    return LINK.sub(link, without_log(text))


def source_page(path: str) -> str:
    """Return a page with the text of a file, or with links to the files of a folder."""
    head = f"---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n# {path}\n\n"
    place = ROOT / path
    if place.is_dir():
        names = sorted(one.relative_to(place).as_posix() for one in place.rglob("*") if _is_source(one))
        return head + "\n".join(f"- [{name}]({PurePosixPath(path).name}/{name}.md)" for name in names) + "\n"
    if place.suffix == ".md":
        return f"---\nsearch:\n  exclude: true\n---\n\n{rewritten(path, page_of(path), place.read_text())}"
    language = LANGUAGES.get(place.suffix, "cmake" if place.name == "CMakeLists.txt" else "text")
    return f"{head}~~~~~{language}\n{place.read_text()}\n~~~~~\n"


def files_below(path: str) -> set[str]:
    """Return the files of a folder, by their paths in the repository."""
    place = ROOT / path
    return (
        {one.relative_to(ROOT).as_posix() for one in place.rglob("*") if _is_source(one)} if place.is_dir() else set()
    )


def _is_source(path: Path) -> bool:
    return (
        path.is_file() and (path.suffix in LANGUAGES or path.name == "CMakeLists.txt") and path.stat().st_size < 1 << 18
    )
