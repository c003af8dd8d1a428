"""``penstock.pipeline``: make a callable for a task and a model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.errors import InvalidArgumentError
from penstock.lite.model import Model
from penstock.llm.llm import LLM
from penstock.offline.backends import default_backend
from penstock.offline.infer_config import FIELDS, InferConfig
from penstock.offline.sources import find_source
from penstock.offline.tasks import InferTask
from penstock.offline.text_tasks.natural import natural_task, task_of_files
from penstock.validation import refusal

__all__ = ["pipeline"]


def pipeline(
    task: str | None = None,
    model: object = None,
    tokenizer: object = None,
    image_processor: object = None,
    audio_processor: object = None,
    backend: str | None = None,
    **options: Any,
) -> Any:
    """Return a pipeline for ``task``, which is called with prompts: see TextGeneration.

    ``task``: by default the one that the model is for, by the class of its network: "text_generation", which may be
    spelled "text-generation", "text_classification" and so on.

    ``model``: a bundle, a checkpoint folder, a pair of bundles (prefill, increment), a model folder (one YAML file, and
    bundles named *_prefill_graph.psm and *_inc_graph.psm), a YAML file, an InferConfig, an
    open LLM or ``lite.Model``, or a name to search for in ``search_path`` or ``PENSTOCK_MODELS``.

    ``tokenizer``: None (the bundle's own), a path, or an object with encode and decode.  ``image_processor`` and
    ``audio_processor`` are for tasks that use them.  ``backend``: "graph", "lite" or "eager" ("ms" and "mslite" are
    aliases of the first two); None is the backend of an open model, or "graph".  ``options``: the fields of InferConfig
    and the options of the task: ``scheme``, ``network``, ``threads``, ``verify``.

    Raises InvalidArgumentError, UnsupportedError, FileAccessError or InvalidFileError, which names the field or the
    file.
    """
    values = {name: options.pop(name) for name in FIELDS if name in options}
    if model is None and not values:
        path = task if isinstance(task, (str, os.PathLike)) and Path(task).exists() else "model.psm"
        raise InvalidArgumentError(
            f"model: expected a path or a name, got none; pipeline('text_generation', {str(path)!r}) opens one",
            param="model",
        )
    search_path = _folders(options.pop("search_path", None))
    if isinstance(model, (LLM, Model)):
        refused = [*values, *(["search_path"] if search_path is not None else [])]
        if refused:
            raise InvalidArgumentError(
                f"{refused[0]}: cannot be set for a model that is already open", param=refused[0]
            )
        config, options["running"] = InferConfig(), model
    else:
        config = find_source(model, values, search_path)
    processors = {"tokenizer": tokenizer, "image_processor": image_processor, "audio_processor": audio_processor}
    options["backend"] = default_backend(model) if backend is None else backend
    if task in (None, ""):
        task = _task_of(model, config)
    return InferTask.get_infer_task(task, config, **processors, **options)


def _task_of(model: object, config: InferConfig) -> str:
    """Return the task that a model is for."""
    if isinstance(model, LLM):
        return natural_task(model)
    if isinstance(model, Model) or config.increment_model_path:
        return "text_generation"
    return task_of_files(config.bundle)


def _folders(search_path: object) -> list[Path] | None:
    if search_path is None:
        return None
    folders = [search_path] if isinstance(search_path, (str, os.PathLike)) else search_path
    if not isinstance(folders, Iterable) or not all(isinstance(folder, (str, os.PathLike)) for folder in folders):
        raise refusal("search_path", "a folder or a list of folders", search_path)
    return [Path(folder) for folder in folders]
