"""What mkdocs calls: generate the reference, and pages for linked files outside docs/."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from generate import commands, errors, families, figures, http, python_api, settings, source_pages

ROOT = Path(__file__).parents[2]
SHIM = "https://unpkg.com/iframe-worker/shim"
WORKER = "assets/file-worker.js"
ICON = "src/penstock/serving/web_page/icon.svg"


def generated() -> dict[str, str]:
    """Return the generated pages and files, by their paths in the site."""
    rest, description = http.rest()
    made = commands.pages() | errors.pages() | families.pages() | figures.pages()
    made |= settings.pages() | python_api.pages()
    header = (ROOT / "core/include/penstock.h").read_text()
    own_op = (ROOT / "core/include/penstock_op.h").read_text()
    made["reference/c-api.md"] = (
        "# C API\n\n[Devices](../guides/devices.md#the-c-api) shows how to use it.\n\n"
        f"## penstock.h\n\n```c\n{header}```\n\n## penstock_op.h\n\nFor [custom ops](../guides/custom-ops.md).\n\n"
        f"```c\n{own_op}```\n"
    )
    return made | {"reference/http.md": rest, "reference/grpc.md": http.grpc(), "reference/openapi.json": description}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, the contributors' page, and a page for each linked file outside docs/."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    linked = source_pages.links_of("CONTRIBUTING.md", contributing)
    for file in files.documentation_pages():
        linked |= source_pages.links_of(f"docs/{file.src_uri}", file.content_string)
    made = generated()
    made["contributing/index.md"] = source_pages.rewritten("CONTRIBUTING.md", "contributing/index.md", contributing)
    while linked:
        path = linked.pop()
        if source_pages.page_of(path) in made:
            continue
        made[source_pages.page_of(path)] = source_pages.source_page(path)
        linked |= source_pages.files_below(path)
        if path.endswith(".md"):
            linked |= source_pages.links_of(path, (ROOT / path).read_text())
    for path, text in made.items():
        stub = files.get_file_from_path(path)  # what a reader of the repository finds there
        if stub is not None:
            files.remove(stub)
        files.append(File.generated(config, path, content=text))
    icon = (ROOT / ICON).read_text()
    files.append(File.generated(config, "assets/icon.svg", content=icon))
    files.append(File.generated(config, "assets/logo.svg", content=re.sub(r'fill="#\w+"', 'fill="#fff"', icon)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files outside docs/ into links to their pages."""
    if page.file.generated_by:
        return markdown
    return source_pages.rewritten(f"docs/{page.file.src_uri}", page.file.src_uri, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load the worker of the search from the site instead of another host."""
    return output.replace(SHIM, get_relative_url(WORKER, page.url))


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for the page of unknown addresses."""
    return output.replace(SHIM, f"/{WORKER}")


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Fail if a page of docs/ is not in the navigation."""
    listed = {page.file.src_uri for page in nav.pages}
    missing = [
        file.src_uri
        for file in files.documentation_pages()
        if file.src_uri not in listed and not file.src_uri.startswith("source/")
    ]
    if missing:
        raise ValueError(f"mkdocs.yml: nav lacks {', '.join(sorted(missing))}")
    return nav
