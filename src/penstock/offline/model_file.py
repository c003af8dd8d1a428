"""Read a configuration file, which says what to run or to export: a YAML file of Penstock or of MindFormers.

``penstock.pipeline``, ``penstock infer``, ``AutoModel.from_config`` and exports read such files with this module, so a
file means the same everywhere.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.config import is_integer
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.file_kinds import refuse_mindspore
from penstock.llm.sampling_keywords import sampling_of_keywords
from penstock.offline.infer_config import check_file
from penstock.offline.mindspore_names import with_bundles
from penstock.offline.yaml_file import read_yaml
from penstock.quant.scheme import find_scheme

__all__ = ["MODEL_FIELDS", "SECTIONS", "YAML_SUFFIXES", "ModelFile", "read_model_file"]

YAML_SUFFIXES: Final = (".yaml", ".yml")
SECTIONS: Final = (
    "run_mode", "load_checkpoint", "src_strategy_path_or_dir", "scheme", "use_parallel", "parallel_config", "model",
    "infer",
)  # fmt: skip
_GENERATION: Final = ("do_sample", "top_k", "top_p", "temperature", "repetition_penalty")
_LENGTHS: Final = {"max_decode_length": "max_length", "max_length": "max_length", "max_new_tokens": "max_new_tokens"}
MODEL_FIELDS: Final = (
    "use_past", "is_sample_acceleration", "checkpoint_name_or_path", "seq_length", *_GENERATION, *_LENGTHS,
)  # fmt: skip
_RANKS: Final = {
    "model_parallel": "tensor_parallel_size",
    "pipeline_stage": "pipeline_parallel_size",
    "context_parallel": "context_parallel_size",
}
"""The sizes of parallel_config, and the options of LLM that they set."""
_OF_OTHERS: Final = {
    "data_parallel": "one model runs here; `penstock serve --workers N` starts copies",
    "expert_parallel": "experts are divided over the ranks of model_parallel",
}
"""The other sizes of parallel_config, which change no token, and what there is instead."""
_OF_PARALLEL: Final = (
    *_RANKS, *_OF_OTHERS, "gradient_aggregation_group", "micro_batch_num", "optimizer_shard", "recompute",
    "select_recompute", "seq_split_num", "use_seq_parallel", "vocab_emb_dp",
)  # fmt: skip
"""The fields of parallel_config that are known; those that are not sizes change no token."""
_FOR_OTHERS: Final = frozenset((
    "auto_trans_ckpt", "auto_tune", "autotune_per_step", "callbacks", "context", "eval_callbacks", "eval_dataset",
    "eval_dataset_task", "filepath_prefix", "init_start_profile", "layer_decay", "layer_scale", "load_ckpt_format",
    "lr_scale", "lr_scale_factor", "lr_schedule", "metric", "micro_batch_interleave_num", "moe_config",
    "only_save_strategy", "optimizer", "output_dir", "parallel", "processor", "profile", "profile_communication",
    "profile_memory", "profile_start_step", "profile_stop_step", "recompute_config", "remote_save_url",
    "resume_training", "runner", "runner_config", "runner_wrapper", "save_file", "seed", "train_dataset",
    "train_dataset_task", "trainer", "wrapper",
))  # fmt: skip
"""Sections of MindFormers about training, data and devices, which change no token: no misspelled ones of SECTIONS."""
_TYPO: Final = 0.8
"""The similarity from which on an unknown name probably means a known one."""
_LOG: Final = logging.getLogger("penstock.offline")


@dataclass(frozen=True)
class ModelFile:
    """The content of a configuration file, whose paths are relative to it.

    ``load_checkpoint``: the path of a checkpoint folder, a GGUF file or a bundle, or None.  ``strategy``: the path of
    the strategy that a sharded folder is cut with, or of the folder with it, or None.  ``infer``: the section of
    that name.  ``seq_length``: tokens of prompt and answer, or None.  ``generation``: defaults of sampling, by the
    names of ``AutoModel.generate``.  ``ranks``: options of LLM.  ``is_sample_acceleration``: whether the graph chooses
    its tokens.
    """

    path: Path
    run_mode: str
    load_checkpoint: str | None
    scheme: str | None
    strategy: str | None = None
    infer: dict[str, Any] = field(default_factory=dict)
    seq_length: int | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    is_sample_acceleration: bool = False

    def checkpoint(self) -> Path | None:
        """Return the path of ``load_checkpoint``; UnsupportedError for files of MindSpore."""
        if self.load_checkpoint is None:
            return None
        path = self.path.parent / self.load_checkpoint
        refuse_mindspore(path, where=f"{self.path}: load_checkpoint: ", param="load_checkpoint")
        return path


def read_model_file(path: Path, *, skip: tuple[str, ...] | None = None) -> ModelFile:
    """Read and check a configuration file; ``skip``: fields of ``infer`` that are not checked, by default its paths.

    Sections and fields that are not used are named in a line of the log.  Raises InvalidFileError, UnsupportedError or
    FileAccessError, which names the file and the field.
    """
    values = read_yaml(path)
    _check_names(path, values)
    model = _mapping(path, "model", values.get("model"))
    config = _mapping(path, "model.model_config", model.get("model_config"))
    _check_typos(f"{path}: model_config", config, MODEL_FIELDS)
    for name in ("use_past", "is_sample_acceleration"):
        if name in config and not isinstance(config[name], bool):
            raise _wrong(path, f"model_config.{name}", "true or false", config[name])
    ranks = _ranks(path, values)
    _tell_unused(path, values, model, config)
    infer = with_bundles(path, _mapping(path, "infer", values.get("infer")))
    if skip is None:
        check_file(infer, path)
    else:
        check_file(infer, path, skip)
    return ModelFile(
        path,
        str(values.get("run_mode", "export")),
        _load_checkpoint(path, values.get("load_checkpoint") or config.get("checkpoint_name_or_path")),
        _scheme(path, values.get("scheme")),
        _path(path, "src_strategy_path_or_dir", values.get("src_strategy_path_or_dir")),
        infer,
        _seq_length(path, config.get("seq_length")),
        _generation(path, config),
        ranks,
        bool(config.get("is_sample_acceleration")),
    )


def _check_names(path: Path, values: Mapping[str, Any]) -> None:
    if "network" in values:
        raise UnsupportedError(
            f"{path}: network: not allowed in a file, because it names code to run; use --network or network=",
            param="network",
        )
    if values.get("only_save_strategy"):
        raise UnsupportedError(
            f"{path}: only_save_strategy: expected false; `penstock plan MODEL --tp N --out strategy.json` writes a "
            "strategy",
            param="only_save_strategy",
        )
    others = {name: value for name, value in values.items() if name not in _FOR_OTHERS}
    _check_typos(str(path), others, SECTIONS)


def _tell_unused(path: Path, values: Mapping[str, Any], model: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Log the names of what a file has for training, data and devices, and of what checkpoints have in config.json."""
    parallel = _mapping(path, "parallel_config", values.get("parallel_config"))
    unused = [
        *values.keys() - {*SECTIONS},
        *(f"model.{name}" for name in model if name != "model_config"),
        *(f"model.model_config.{name}" for name in config if name not in MODEL_FIELDS),
        *(f"parallel_config.{name}" for name in parallel if name not in {*_RANKS, *_OF_OTHERS}),
    ]
    if config.get("use_past") is False:  # a graph without keys and values would make the same tokens
        unused.append("model.model_config.use_past: False")
    if unused:
        _LOG.warning("%s: not used: %s", path, ", ".join(repr(name[:80]) for name in sorted(unused)))


def _check_typos(where: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in values:
        close = difflib.get_close_matches(str(name), known, 1, _TYPO)
        if name not in known and close:
            raise InvalidFileError(f"{where}: unknown field {name!r:.60}; did you mean {close[0]}?", param=str(name))


def _load_checkpoint(path: Path, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _wrong(path, "load_checkpoint", "the path of a checkpoint folder or a bundle, a string", value)
    return value or None


def _path(path: Path, name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _wrong(path, name, "a path, a string", value)
    return value or None


def _scheme(path: Path, value: object) -> str | None:
    if not value:
        return None
    if not isinstance(value, str):
        raise _wrong(path, "scheme", "a string", value)
    try:
        find_scheme(value)
    except InvalidArgumentError as error:
        raise InvalidFileError(f"{path}: {error}", param="scheme") from None
    return value


def _seq_length(path: Path, value: Any) -> int | None:
    if value is None:
        return None
    if not is_integer(value, 1, 1 << 24):
        raise _wrong(path, "model_config.seq_length", "an integer from 1 to 16777216", value)
    length: int = int(value)
    return length


def _generation(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of sampling; a length of new tokens replaces one of prompt and answer."""
    values = {name: config[name] for name in _GENERATION if config.get(name) is not None}
    if values.get("do_sample") is False:
        values.pop("temperature", None)  # greedy: MindFormers and transformers do not use it
    lengths = {_LENGTHS[name]: config[name] for name in _LENGTHS if config.get(name) is not None}
    if "max_new_tokens" in lengths:
        lengths.pop("max_length", None)
    length = lengths.get("max_length", 1)
    if not is_integer(length, 1, 1 << 24):
        raise _wrong(path, "model_config.max_decode_length", "an integer from 1 to 16777216", length)
    try:
        sampling_of_keywords({k: v for k, v in (values | lengths).items() if k != "max_length"}, 1.0)
    except PenstockError as error:
        raise InvalidFileError(f"{path}: model_config.{error}", param=error.param) from None
    return values | lengths


def _ranks(path: Path, values: Mapping[str, Any]) -> dict[str, int]:
    """Return how many processes run the model: the sizes of parallel_config, if use_parallel is true."""
    uses = values.get("use_parallel") or False
    if not isinstance(uses, bool):
        raise _wrong(path, "use_parallel", "true or false", uses)
    config = _mapping(path, "parallel_config", values.get("parallel_config"))
    _check_typos(f"{path}: parallel_config", config, _OF_PARALLEL)
    for name, instead in _OF_OTHERS.items():
        size = config.get(name, 1)
        if not is_integer(size, 1, 1 << 16):
            raise _wrong(path, f"parallel_config.{name}", "an integer of at least 1", size)
        if uses and size > 1:
            _LOG.warning("%s: parallel_config.%s: %s is not used: %s", path, name, size, instead)
    ranks = {}
    for name, option in _RANKS.items():
        size = config.get(name, 1)
        if not is_integer(size, 1, 1 << 16):
            raise _wrong(path, f"parallel_config.{name}", "an integer of at least 1", size)
        if uses and size > 1:
            ranks[option] = int(size)
    return ranks


def _mapping(path: Path, name: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(path, name, "a mapping", value)
    return value


def _wrong(path: Path, name: str, expected: str, value: object) -> InvalidFileError:
    return InvalidFileError(f"{path}: {name}: expected {expected}, got {value!r:.60}", param=name)
