"""The reference of configuration: fields of dataclasses, sampling fields, environment variables; and of metrics."""

from __future__ import annotations

import inspect
import re
from typing import Any

from generate.markdown import code, definitions, fields, page, summary, table
from penstock import env
from penstock.engine.options import EngineOptions, RequestOptions
from penstock.llm.local_backend import LocalModels
from penstock.offline.infer_config import InferConfig
from penstock.offline.model_file import MODEL_FIELDS, SECTIONS
from penstock.runtime.program import ProgramLimits
from penstock.sampling_fields import SAMPLING_FIELDS
from penstock.servables.api.settings import Settings
from penstock.servables.lifecycle.report import metric_lines
from penstock.serving.metrics import Metrics
from penstock.serving.settings import GatewayLimits, GatewaySettings

CLASSES: tuple[tuple[str, type, str], ...] = (
    ("Limits of a service", GatewayLimits, "`--max-body-bytes`, `--max-open` and `--max-seconds` set three of them."),
    ("Addresses and access of a service", GatewaySettings, "Options of `penstock serve` set these."),
    ("Memory of a program", ProgramLimits, "Keywords of `LLM`, `AsyncLLM` and `pipeline`."),
    ("The engine", EngineOptions, "Keywords of `LLM` and `AsyncLLM`."),
    ("A request", RequestOptions, "`options=` of `LLM`, and fields of request bodies."),
    ("A servable", Settings, "Keywords of `servable.settings()`."),
    ("A pipeline", InferConfig, "Keywords of `pipeline`, and the section `infer` of a YAML file."),
)


def configuration() -> str:
    """Return the page about configuration."""
    parts = []
    for title, kind, note in CLASSES:
        parts += [f"## {title}", f"`{kind.__module__}.{kind.__name__}`. {summary(kind)} {note}".strip(), fields(kind)]
    return page(
        "Configuration",
        "The fields that Python, the command line and files share, with their types and defaults. "
        "[Command line](cli/index.md) has the options, [Sampling fields](sampling.md) those of sampling.",
        "## Environment variables",
        definitions(variables()),
        *parts,
        "## The YAML file of a model",
        f"Sections: {', '.join(map(code, SECTIONS))}. Fields of `model.model_config`: "
        f"{', '.join(map(code, MODEL_FIELDS))}. [Offline use](../guides/offline.md#making-bundles) explains them.",
    )


def variables() -> list[tuple[str, str]]:
    """Return the environment variables and what they do, from the docstrings of ``penstock.env``."""
    found = []
    for name in env.__all__:
        text = " ".join((inspect.getdoc(getattr(env, name)) or "").split())
        match = re.match(r"``(PENSTOCK_\w+)(?:=\w+)?``", text)
        if match and "Penstock sets it" not in text:
            rest = text[match.end() :].lstrip(":, ")
            found.append((code(match[1]), (rest[0].upper() + rest[1:]).replace("``", "`")))
    return found


def sampling() -> str:
    """Return the page about sampling fields and schemes."""
    rows = []
    for row in SAMPLING_FIELDS:
        bounds = "" if row.bounds == (0, 0) else f"{row.bounds[0]:g} to {row.bounds[1]:g}"
        rows.append((code(row.name), row.kind.replace("_", " "), bounds, code(row.default), row.help))
    return page(
        "Sampling fields",
        "The fields of `SamplingParams`, of request bodies and of the command line, from the one table that all of "
        "them read. `None` takes the value of the model's `generation_config.json`. "
        "[Sampling](../guides/sampling.md) explains how to use them.",
        table(("field", "type", "bounds", "default", "meaning"), rows),
    )


class _NoServables:
    def list(self) -> list[Any]:
        return []

    def all(self) -> list[Any]:
        return []


def metrics() -> str:
    """Return the page about metrics, from what a service without models and servables answers."""
    text = Metrics(LocalModels([])).text().decode() + "\n".join(metric_lines(_NoServables()))  # type: ignore[arg-type]
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    kinds = dict(re.findall(r"^# TYPE (\S+) (.*)$", text, re.MULTILINE))
    groups = (
        ("Models", "vllm:", "Labels: `model_name` and `engine`. The names are vLLM's, so that its dashboards work."),
        ("Penstock", "penstock:", "Labels: `model_name`; `cause` of a restart; `method`, `servable` and `version`."),
        (
            "HTTP and gRPC",
            "",
            "Labels: `handler`, `method` and `status`; `grpc_service`, `grpc_method` and `grpc_code`.",
        ),
    )
    parts = []
    for title, prefix, note in groups:
        names = [name for name in helps if name.startswith(prefix)]
        rows = [(code(name), kinds[name], helps.pop(name)) for name in names]
        parts += [f"## {title}", note, table(("metric", "type", "meaning"), rows)]
    return page(
        "Metrics",
        "`GET /metrics` answers in Prometheus' text format. Latencies are in seconds, from the arrival of a request at "
        "the gateway until a delta is passed to the connection. A worker's warm-up is not counted.",
        *parts,
    )


def pages() -> dict[str, str]:
    """Return the pages."""
    return {
        "reference/configuration.md": configuration(),
        "reference/sampling.md": sampling(),
        "reference/metrics.md": metrics(),
    }
