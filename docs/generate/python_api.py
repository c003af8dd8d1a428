"""The reference of the Python API: a page for each part, which mkdocstrings fills from the docstrings."""

from __future__ import annotations

import penstock
from generate.markdown import page
from penstock import lite, nn, servable

PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "text": ("Text generation", ("LLM", "AsyncLLM", "AsyncStream", "Stream", "Conversation", "Turn", "SamplingParams",
             "RequestOptions", "EngineOptions", "ProgramLimits", "Result", "Choice", "Delta", "Score", "Embedding",
             "TokenLogprobs", "Streamer", "TextStreamer")),
    "pipeline": ("Pipelines and Auto classes", ("pipeline", "InferConfig", "InferTask", "AutoModel", "AutoConfig",
                 "AutoTokenizer")),
    "client": ("Clients of a service", ("Client", "AsyncClient")),
    "models": ("Export, quantization and networks", ("export", "load_network", "register_network", "RoundToNearest",
               "RoundToNearestConfig", "custom_op", "load_ops")),
    "errors": ("Exceptions", ("PenstockError", "InvalidArgumentError", "InvalidFileError", "UnsupportedError",
               "OutOfMemoryError", "FileAccessError", "QueueFullError", "DeadlineError", "NotFoundError",
               "UnavailableError", "ServiceError", "InternalError")),
}  # fmt: skip
MODULES = {"lite": lite, "servable": servable, "nn": nn}


def pages() -> dict[str, str]:
    """Return the pages; ValueError if they lack a public name."""
    listed = {name for _, names in PARTS.values() for name in names} | {"__version__"}
    missing = set(penstock.__all__) - listed
    if missing:
        raise ValueError(f"docs/generate/python_api.py lacks {sorted(missing)}")
    made = {}
    for part, (title, names) in PARTS.items():
        homes = [_home(penstock, name) for name in names if name in penstock.__all__]
        made[f"reference/python/{part}.md"] = page(title, *homes)
    for part, module in MODULES.items():
        about = f"::: penstock.{part}\n    options:\n      members: false\n      show_root_heading: false"
        homes = [_home(module, name) for name in module.__all__]
        made[f"reference/python/{part}.md"] = page(f"penstock.{part}", about, *homes)
    return made


def _home(module: object, name: str) -> str:
    """Return the directive for a public name, by the module that defines it."""
    thing = getattr(module, name)
    home = getattr(thing, "__module__", "")
    if not home.startswith("penstock"):
        return f"## {name}\n\n`{module.__name__}.{name}`, of `{home}`."  # type: ignore[attr-defined]
    shown = f"{getattr(module, '__name__')}.{name}"  # noqa: B009
    return f"::: {home}.{getattr(thing, '__qualname__', name)}\n\nImport it as `{shown}`."
