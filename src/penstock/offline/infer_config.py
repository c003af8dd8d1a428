"""The configuration of a pipeline: files, sequence length, device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from penstock.config import check_integer
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.lite.device import check_target
from penstock.validation import nearest, refusal

__all__ = ["FileConfig", "InferConfig", "check_file", "infer_config"]

_PATHS: Final = ("prefill_model_path", "increment_model_path", "config_path", "ge_config_path")
_MAX_SEQ_LENGTH: Final = 1 << 24
_INSTEAD: Final = (
    " Export the checkpoint folder with `penstock export FOLDER OUT.psm` and run that; files of other formats, such as "
    "MindIR, cannot be read."
)


@dataclass
class InferConfig:
    """The configuration of a pipeline.

    ``prefill_model_path``: the bundle that reads prompts.  ``increment_model_path``: the bundle that generates tokens;
    it must have the same graph and weights, and "" means the same file.  ``model_type``: "penstock".  ``model_name``:
    the name of the model, which is searched for if there are no paths.  ``infer_seq_length``: the most tokens of prompt
    and answer; 0 means as many as the model allows.  ``target``: "cpu".  ``device_id`` and ``rank_id``: 0.
    ``config_path``: a file with the fields of ``lite.settings.ModelConfig``; ``ge_config_path``: its alias.

    Raises InvalidArgumentError or UnsupportedError, which names the field.  Fields set later are checked when a
    pipeline is made.  A field that does not exist cannot be set.
    """

    prefill_model_path: str = ""
    increment_model_path: str = ""
    model_type: str = "penstock"
    model_name: str = "common"
    infer_seq_length: int = 0
    target: str = "cpu"
    device_id: int = 0
    rank_id: int = 0
    config_path: str = ""
    ge_config_path: str = ""

    def __post_init__(self) -> None:
        """Check every field."""
        for name in _PATHS:
            value = getattr(self, name)
            if not isinstance(value, (str, os.PathLike)):
                raise refusal(name, "a file name", value)
            setattr(self, name, os.fspath(value))
        if self.ge_config_path:
            if self.config_path:
                raise InvalidArgumentError(
                    "config_path and ge_config_path are the same field: set only one of them", param="config_path"
                )
            self.config_path, self.ge_config_path = self.ge_config_path, ""
        kind = getattr(self.model_type, "value", self.model_type)
        if kind != "penstock":
            raise UnsupportedError(
                f"model_type must be 'penstock', a bundle (.psm), not {self.model_type!r:.60}.{_INSTEAD}",
                param="model_type",
            )
        if not isinstance(self.model_name, str) or not self.model_name:
            raise refusal("model_name", "a non-empty string", self.model_name)
        check_target([self.target])
        for name, maximum in (("infer_seq_length", _MAX_SEQ_LENGTH), ("device_id", 1 << 20), ("rank_id", 1 << 20)):
            check_integer(name, getattr(self, name), 0, maximum)
        for name in ("device_id", "rank_id"):
            if getattr(self, name):
                raise UnsupportedError(
                    f"{name} must be 0, not {getattr(self, name)}: the target cpu has one device", param=name
                )
        if self.increment_model_path and not self.prefill_model_path:
            raise InvalidArgumentError("increment_model_path requires prefill_model_path", param="increment_model_path")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).__dataclass_fields__:
            raise InvalidArgumentError(_no_field("InferConfig", name), param=name)
        super().__setattr__(name, value)

    @property
    def bundle(self) -> Path:
        """The bundle that is opened; it reads prompts and generates tokens."""
        return Path(self.prefill_model_path)


FIELDS: Final = tuple(item.name for item in fields(InferConfig))


@dataclass
class FileConfig(InferConfig):
    """The configuration that a YAML file gives, with what the fields of a pipeline cannot say.

    ``scheme``: how the weights of a checkpoint folder are stored.  ``generation``: defaults of sampling, by the names
    of ``AutoModel.generate``.  ``ranks``: options of LLM, the sizes of the group of processes that runs the model.
    """

    scheme: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)


def infer_config(values: Mapping[str, Any], where: str = "pipeline") -> InferConfig:
    """Make an InferConfig from a dictionary; InvalidArgumentError names an unknown field."""
    for name in values:
        if name not in FIELDS:
            raise InvalidArgumentError(_no_field(where, name), param=name)
    return InferConfig(**values)


def check_file(values: Mapping[str, Any], file: Path, skip: Sequence[str] = _PATHS) -> None:
    """Check the section ``infer`` of a file without the fields in ``skip``; the error names the file and the field."""
    where = f"{file}: infer"
    try:
        infer_config({name: value for name, value in values.items() if name not in skip}, where)
    except PenstockError as error:
        text = str(error) if str(error).startswith(where) else f"{where}: {error}"
        kind = InvalidFileError if isinstance(error, InvalidArgumentError) else type(error)
        raise kind(text, param=error.param) from error


def _no_field(where: str, name: object) -> str:
    near = nearest(str(name), FIELDS)
    hint = f"did you mean {near}?" if near else f"expected one of {', '.join(FIELDS)}"
    return f"{where}: unknown field {name!r:.60}; {hint}"
