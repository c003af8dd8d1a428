"""An environment without PyTorch, and what its process says of models.

``make_environment`` makes one that has the packages which ``pip install penstock`` brings, and no others.  Run as a
script in it, this file reads {"models": [paths], "commands": [argument lists], "out": a file to use} from the standard
input and writes the answers as JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROMPT = [5, 9, 100, 31, 7, 44, 2, 88, 61, 13]


def make_environment(folder: Path) -> Path:
    """Make the environment in ``folder``, and return its Python."""
    import penstock

    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "penstock").symlink_to(Path(penstock.__file__).parent)
    (site / "tests.pth").write_text(f"{ROOT}\n")
    for path in runtime_entries():
        (site / path.name).symlink_to(path)
    return folder / "bin" / "python"


def runtime_entries() -> list[Path]:
    """The files and folders, in their site-packages, of every package that the package requires without an extra."""
    import tomllib
    from importlib.metadata import distribution

    from packaging.requirements import Requirement

    waiting = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    entries: dict[str, Path] = {}
    seen: set[str] = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        package = distribution(requirement.name)
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        entries |= {top: Path(str(package.locate_file(top))) for top in tops}
        waiting += package.requires or []
    return [path for _, path in sorted(entries.items())]


def answer(path: Path, out: Path) -> list[str]:
    """The digest of a model's bundle, and that of its logits and tokens for a prompt."""
    from penstock.graph.export import export_bundle
    from penstock.runtime.native import NativeProgram
    from penstock.runtime.program import ProgramLimits
    from tests.models.steps import run_whole

    export_bundle(path, out)
    limits = ProgramLimits(max_tokens=32, max_requests=1, max_rows=32, num_pages=2, context_len=48)
    program, _ = NativeProgram.open(out, threads=1, limits=limits)
    try:
        logits = run_whole(program, PROMPT)
    finally:
        program.close()
    tokens = " ".join(str(token) for token in logits.argmax(1))
    return [hashlib.sha256(data).hexdigest() for data in (out.read_bytes(), logits.tobytes())] + [tokens]


def _answers(paths: list[str], out: Path) -> dict[str, list[str]]:
    answers = {}
    for path in paths:
        try:
            answers[path] = answer(Path(path), out)
        except Exception as error:
            answers[path] = [type(error).__name__, str(error)]
    return answers


def _command(words: list[str]) -> dict[str, Any]:
    from penstock.cli.main import main

    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = main(words)
        except SystemExit as end:
            status = int(end.code or 0)
    return {"status": status, "out": out.getvalue(), "error": error.getvalue()}


if __name__ == "__main__":
    present = [name for name in ("torch", "transformers", "safetensors", "pytest") if importlib.util.find_spec(name)]
    work = json.load(sys.stdin)
    result = {
        "present": present,
        "models": _answers(work["models"], Path(work["out"])),
        "commands": [_command(words) for words in work["commands"]],
    }
    print(json.dumps(result))
