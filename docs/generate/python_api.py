"""The reference of the Python API: a page for each part, which mkdocstrings fills from the docstrings."""

from __future__ import annotations

import ast
from pathlib import Path

from generate.markdown import page

PACKAGE = Path(__file__).parents[2] / "src" / "penstock"

PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "text": ("Text generation", ("LLM", "AsyncLLM", "AsyncStream", "Stream", "Conversation", "Turn", "SamplingParams",
             "RequestOptions", "EngineOptions", "ProgramLimits", "Result", "Choice", "Delta", "Score", "Embedding",
             "Classification", "Ranked", "TokenLogprobs", "Streamer", "TextStreamer")),
    "pipeline": ("Pipelines and Auto classes", ("pipeline", "InferConfig", "InferTask", "AutoModel", "AutoConfig",
                 "AutoTokenizer", "GenerationConfig", "GenerateOutput")),
    "client": ("Clients of a service", ("Client", "AsyncClient")),
    "models": ("Export, quantization and networks", ("export", "load_network", "register_network", "PTQ", "PTQConfig",
               "PTQMode", "BackendTarget", "RoundToNearest", "RoundToNearestConfig", "custom_op", "load_ops")),
    "networks": ("General networks", ("capture", "read_network", "compile", "open_predictor", "CapturedNetwork",
                 "CompiledModule", "Predictor")),
    "errors": ("Exceptions", ("PenstockError", "InvalidArgumentError", "InvalidFileError", "UnsupportedError",
               "OutOfMemoryError", "FileAccessError", "QueueFullError", "DeadlineError", "NotFoundError",
               "UnavailableError", "ServiceError", "InternalError")),
}  # fmt: skip
MODULES = ("lite", "servable", "nn")


def pages() -> dict[str, str]:
    """Return the pages; ValueError if they lack a public name."""
    listed = {name for _, names in PARTS.values() for name in names} | {"__version__"}
    missing = set(names_of("__init__.py")) - listed
    if missing:
        raise ValueError(f"docs/generate/python_api.py lacks {sorted(missing)}")
    made = {}
    for part, (title, names) in PARTS.items():
        made[f"reference/python/{part}.md"] = page(title, *(f"::: penstock.{name}" for name in names))
    for part in MODULES:
        about = f"::: penstock.{part}\n    options:\n      members: false\n      show_root_heading: false"
        place = f"{part}.py" if (PACKAGE / f"{part}.py").exists() else f"{part}/__init__.py"
        names = names_of(place)
        directives = (f"::: penstock.{part}.{name}" for name in names if name not in names_of_torch(place))
        made[f"reference/python/{part}.md"] = page(f"penstock.{part}", about, *directives)
    return made


def names_of_torch(path: str) -> set[str]:
    """Return the names that a module takes from PyTorch, whose own documentation describes them."""
    nodes = ast.walk(ast.parse((PACKAGE / path).read_text()))
    found = (node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"))
    return {alias.name for node in found for alias in node.names}


def names_of(path: str) -> list[str]:
    """Return the ``__all__`` of a module, without importing it and with it PyTorch."""
    for node in ast.parse((PACKAGE / path).read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{path} has no __all__")
