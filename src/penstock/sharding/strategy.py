"""A sharding strategy: which part of each parameter each rank has.  ``penstock plan`` writes it as a file.

A strategy is for one model (the checksum of its config.json) and one layout of ranks.  The reader refuses every field
that is missing, unknown or wrong, and every parameter of which a row would be lost.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.checkpoint.side_files import read_small_file
from penstock.checkpoint.tensor_file import MAX_TENSORS, TensorInfo
from penstock.config import ConfigReader, is_integer, parse_object, show
from penstock.core.comm import MAX_RANKS
from penstock.core.rank_layout import RankLayout
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, UnsupportedError

__all__ = ["LAYOUT_VERSION", "ParameterCut", "RowRanges", "Strategy", "config_checksum"]

RowRanges = tuple[tuple[int, int], ...]
"""Rows ``start`` to ``stop`` - 1 of a parameter, in ascending order; columns of one that is cut by columns."""

LAYOUT_VERSION: Final = 1
"""Raise this when a rank's file arranges its rows in another way."""
_FORMAT: Final = "penstock strategy"
_MAX_BYTES: Final = 256 << 20
_MAX_VALUES: Final = 1 << 24
_CUTS: Final = ("rows", "columns", "replicated", "owner", "same")
_FIELDS: Final = {"rows": "ranges", "columns": "ranges", "replicated": None, "owner": "rank", "same": "name"}
_STAGED: Final = ("rows", "columns", "replicated")
_MAX_ROWS: Final = 1 << 46


@dataclass(frozen=True)
class ParameterCut:
    """The way in which a tensor is cut.

    ``cut`` is "rows" (rank r of a stage has the rows ``ranges[r]``), "columns" (it has these columns of a matrix that
    is stored transposed), "replicated" (every rank of a stage has it), "owner" (only rank ``rank`` of all has it) or
    "same" (it has the bytes of the parameter ``name`` and is not stored).  ``dtype`` is the name in lower case of a
    safetensors type.  ``stages``: those that have the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    cut: str
    ranges: tuple[RowRanges, ...] = ()
    rank: int = 0
    name: str = ""
    stages: tuple[int, ...] = (0,)

    @property
    def axis(self) -> int:
        """The dimension that is cut."""
        return 1 if self.cut == "columns" else 0

    @property
    def size(self) -> int:
        """The size of the dimension that is cut; 1 for a scalar."""
        return self.shape[self.axis] if self.shape else 1

    def part_of(self, rank: int, layout: RankLayout) -> RowRanges | None:
        """Return the rows, or columns, that a rank stores; None if it does not store the tensor."""
        if self.cut == "same":
            return None
        if self.cut == "owner":
            return ((0, self.size),) if rank == self.rank else None
        stage, place = layout.place(rank)
        if stage not in self.stages:
            return None
        return ((0, self.size),) if self.cut == "replicated" else self.ranges[place]

    def shape_of(self, rank: int, layout: RankLayout) -> tuple[int, ...] | None:
        """Return the shape of a rank's part; None if it does not store the tensor."""
        part = self.part_of(rank, layout)
        if part is None or not self.shape:
            return None if part is None else ()
        size = sum(stop - start for start, stop in part)
        return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])


@dataclass(frozen=True)
class Strategy:
    """The parameters of one model over the ranks of ``layout``."""

    model_type: str
    config_sha256: str
    layout: RankLayout
    parameters: Mapping[str, ParameterCut]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.layout.world

    def part_of(self, name: str, rank: int) -> RowRanges | None:
        """Return the rows, or columns, of a parameter that a rank stores; None if it does not store it."""
        return self.parameters[name].part_of(rank, self.layout)

    def shapes_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the parts that a rank stores, with their shapes."""
        shapes = {name: own.shape_of(rank, self.layout) for name, own in self.parameters.items()}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    @property
    def checksum(self) -> str:
        """The SHA-256 of the strategy as a file."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def to_json(self) -> bytes:
        """Return the file: one line for each parameter."""
        head = {
            "format": _FORMAT,
            "layout_version": LAYOUT_VERSION,
            "model": {"model_type": self.model_type, "config_sha256": self.config_sha256},
            "world": {"tp": self.layout.tp, "pp": self.layout.pp, "cp": self.layout.cp},
        }
        lines = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(_fields(parameter, self.layout.pp))}"
            for name, parameter in self.parameters.items()
        )
        return (json.dumps(head, indent=1)[:-2] + ',\n "parameters": {\n' + lines + "\n }\n}\n").encode()

    def write(self, path: Path) -> None:
        """Write the file; an existing one is replaced as a whole."""
        if path.is_dir():
            raise FileAccessError(f"{path}: expected the name of a file, got a folder", param="path")
        temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            temporary.write_bytes(self.to_json())
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise FileAccessError(f"{path}: {error.strerror}") from None

    @classmethod
    def read(cls, path: Path) -> Strategy:
        """Read and check a file.  InvalidFileError or UnsupportedError names the field."""
        if path.is_dir():
            raise FileAccessError(f"{path}: expected a strategy, got a folder", param="path")
        return cls.parse(read_small_file(path, _MAX_BYTES), path.name)

    @classmethod
    def parse(cls, data: bytes, file: str = "strategy.json") -> Strategy:
        """Read and check the bytes of a file; ``file`` names it in errors."""
        reader = ConfigReader(parse_object(data, file, max_bytes=_MAX_BYTES, max_values=_MAX_VALUES), file)
        _check_keys(reader, ("format", "layout_version", "model", "world", "parameters"))
        if reader.str("format") != _FORMAT:
            raise reader.error("format", show(_FORMAT), reader.values["format"])
        version = reader.int("layout_version")
        if version != LAYOUT_VERSION:
            raise UnsupportedError(
                f"{file}: layout_version: expected {LAYOUT_VERSION}, got {version}", param="layout_version"
            )
        layout = _read_layout(_section(reader, "world"))
        model = _section(reader, "model")
        _check_keys(model, ("model_type", "config_sha256"))
        checksum = model.str("config_sha256")
        if len(checksum) != 64 or set(checksum) - set("0123456789abcdef"):
            raise model.error("config_sha256", "64 hexadecimal digits", checksum)
        section = _section(reader, "parameters")
        if not 0 < len(section.values) <= MAX_TENSORS:
            raise reader.error("parameters", f"1 to {MAX_TENSORS} parameters", len(section.values))
        parameters = {}
        for name in section.values:
            entry = ConfigReader(_section(section, name).values, f"{section.file}: {show(name)}")
            parameters[name] = _read_parameter(entry, layout)
        strategy = cls(model.str("model_type"), checksum, layout, parameters)
        strategy.check_same(section.file)
        return strategy

    def check_same(self, file: str) -> None:
        """Check that each parameter that is not stored has the type and shape of a stored one."""
        for name, parameter in self.parameters.items():
            if parameter.cut != "same":
                continue
            other = self.parameters.get(parameter.name)
            if other is None or other.cut == "same" or (other.dtype, other.shape) != (parameter.dtype, parameter.shape):
                raise InvalidFileError(
                    f"{file}: {show(name)}: name: expected a stored parameter of the same type and shape, got "
                    f"{show(parameter.name)}",
                    param=name,
                )

    def check_model(self, config: ConfigReader, tensors: Mapping[str, TensorInfo], where: Path | str) -> None:
        """Check that the strategy is for a checkpoint: its config.json, and each of its tensors.

        Raises InvalidArgumentError (``strategy``), which names what differs.
        """
        checksum = config_checksum(config)
        # Older strategies are of config.json as it is: without this value, if the file does not have it.
        without = {key: value for key, value in config.values.items() if (key, value) != ("tie_word_embeddings", False)}
        if self.config_sha256 not in (checksum, config_checksum(ConfigReader(without, config.file))):
            raise _mismatch(
                f"model.config_sha256: expected {checksum[:16]}..., that of {where}, got {self.config_sha256[:16]}..."
                ", so the strategy is for another model"
            )
        for name in sorted(tensors.keys() ^ self.parameters.keys()):
            kind = "is missing, but" if name in tensors else "is named, but no tensor of"
            raise _mismatch(f"parameters: {show(name)} {kind} {where} has it")
        for name, info in tensors.items():
            own = self.parameters[name]
            if (own.dtype, own.shape) != (info.dtype, info.shape):
                raise _mismatch(
                    f"parameters: {show(name)}: expected {info.dtype} of {list(info.shape)}, that of {where}, got "
                    f"{own.dtype} of {list(own.shape)}"
                )


def config_checksum(config: ConfigReader) -> str:
    """Return the SHA-256 of the values of a config.json, however they are written."""
    text = json.dumps(config.values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _mismatch(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"strategy: {message}", param="strategy")


def _fields(parameter: ParameterCut, num_stages: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"dtype": parameter.dtype, "shape": list(parameter.shape), "cut": parameter.cut}
    if num_stages > 1 and parameter.cut in _STAGED:
        fields["stages"] = parameter.stages
    own = _FIELDS[parameter.cut]
    return fields if own is None else {**fields, own: getattr(parameter, own)}


def _section(reader: ConfigReader, key: str) -> ConfigReader:
    section = reader.object(key)
    if section is None:
        raise reader.error(key, "an object", reader.values.get(key))
    return section


def _check_keys(reader: ConfigReader, keys: tuple[str, ...]) -> None:
    unknown = next((key for key in reader.values if key not in keys), None)
    if unknown is not None:
        raise InvalidFileError(
            f"{reader.file}: {show(unknown)} is not a field; expected {', '.join(keys)}", param=unknown
        )


def _read_layout(reader: ConfigReader) -> RankLayout:
    _check_keys(reader, ("tp", "pp", "cp"))
    sizes = [reader.int(key, max=MAX_RANKS) for key in ("tp", "pp", "cp")]
    try:
        return RankLayout(*sizes)
    except InvalidArgumentError as error:
        raise InvalidFileError(f"{reader.file}: {error}", param="world") from None


def _read_parameter(reader: ConfigReader, layout: RankLayout) -> ParameterCut:
    cut = reader.one_of("cut", _CUTS)
    own, is_staged = _FIELDS[cut], layout.pp > 1 and cut in _STAGED
    _check_keys(
        reader, ("dtype", "shape", "cut", *(("stages",) if is_staged else ()), *(() if own is None else (own,)))
    )
    shape = reader.values.get("shape")
    if not isinstance(shape, list) or len(shape) > 8 or not all(is_integer(size, 0, _MAX_ROWS) for size in shape):
        raise reader.error("shape", "a list of at most 8 sizes", shape)
    stages = _read_stages(reader, layout) if is_staged else (0,)
    base = ParameterCut(reader.str("dtype", max_len=16), tuple(shape), cut, stages=stages)
    if cut in ("rows", "columns"):
        return replace(base, ranges=_read_ranges(reader, base, layout.stage_ranks))
    if cut == "owner":
        return replace(base, rank=reader.int("rank", min=0, max=layout.world - 1))
    if cut == "same":
        return replace(base, name=reader.str("name"))
    return base


def _read_stages(reader: ConfigReader, layout: RankLayout) -> tuple[int, ...]:
    value = reader.values.get("stages")
    is_list = isinstance(value, list) and all(is_integer(stage, 0, layout.pp - 1) for stage in value)
    if not is_list or not value or sorted(set(value)) != value:
        raise reader.error("stages", f"stages from 0 to {layout.pp - 1} that ascend", value)
    return tuple(value)


def _read_ranges(reader: ConfigReader, parameter: ParameterCut, num_ranks: int) -> tuple[RowRanges, ...]:
    """Return the ranges of each rank of a stage: within a rank they ascend, and together they have every row."""
    value, noun = reader.values.get("ranges"), "row" if parameter.cut == "rows" else "column"
    if len(parameter.shape) <= parameter.axis:
        raise reader.error("shape", f"a dimension {parameter.axis}, because {noun}s are cut", list(parameter.shape))
    if not isinstance(value, list) or len(value) != num_ranks:
        raise reader.error("ranges", f"a list for each of {num_ranks} ranks", value)
    ranges = tuple(_read_rank(reader, rank, rows, parameter.size) for rank, rows in enumerate(value))
    end = 0
    for start, stop in sorted(row_range for rows in ranges for row_range in rows):
        if start > end:
            break
        end = max(end, stop)
    if end != parameter.size:
        raise InvalidFileError(f"{reader.file}: ranges: no rank has {noun} {end} of {parameter.size}", param="ranges")
    return ranges


def _read_rank(reader: ConfigReader, rank: int, value: object, num_rows: int) -> RowRanges:
    expected = f"pairs [start, stop] of rows 0 to {num_rows} that ascend, for rank {rank}"
    if not isinstance(value, list) or not value:
        raise reader.error("ranges", expected, value)
    end, rows = 0, []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or not all(is_integer(row, 0, num_rows) for row in pair):
            raise reader.error("ranges", expected, pair)
        start, stop = pair
        if start < end or stop <= start:
            raise reader.error("ranges", expected, pair)
        rows.append((start, stop))
        end = stop
    return tuple(rows)
