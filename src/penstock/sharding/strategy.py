"""A sharding strategy: which rows of each parameter each rank has.  ``penstock plan`` writes it as a file.

A strategy is for one model (the checksum of its config.json) and one world.  The reader refuses every field that is
missing, unknown or wrong, and every parameter of which a row would be lost.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.checkpoint.side_files import read_small_file
from penstock.checkpoint.tensor_file import MAX_TENSORS, TensorInfo
from penstock.config import ConfigReader, is_integer, parse_object, show
from penstock.core.comm import MAX_RANKS
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, UnsupportedError

__all__ = ["LAYOUT_VERSION", "Parameter", "RowRanges", "Strategy", "config_checksum"]

RowRanges = tuple[tuple[int, int], ...]
"""Rows ``start`` to ``stop`` - 1 of a parameter, in ascending order."""

LAYOUT_VERSION: Final = 1
"""Raise this when a rank's file arranges its rows in another way."""
_FORMAT: Final = "penstock strategy"
_MAX_BYTES: Final = 256 << 20
_MAX_VALUES: Final = 1 << 24
_CUTS: Final = ("rows", "replicated", "owner", "same")
_FIELDS: Final = {"rows": "ranges", "replicated": None, "owner": "rank", "same": "name"}
_MAX_ROWS: Final = 1 << 46


@dataclass(frozen=True)
class Parameter:
    """The way in which a tensor is cut.

    ``cut`` is "rows" (rank r has the rows ``ranges[r]``), "replicated" (every rank has it), "owner" (only rank
    ``rank`` has it) or "same" (it has the bytes of the parameter ``name`` and is not stored).  ``dtype`` is the name in
    lower case of a safetensors type.
    """

    dtype: str
    shape: tuple[int, ...]
    cut: str
    ranges: tuple[RowRanges, ...] = ()
    rank: int = 0
    name: str = ""

    @property
    def num_rows(self) -> int:
        """The size of dimension 0; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def rows_of(self, rank: int) -> RowRanges | None:
        """Return the rows that a rank stores; None if it does not store the tensor."""
        if self.cut == "rows":
            return self.ranges[rank]
        if self.cut == "same" or (self.cut == "owner" and rank != self.rank):
            return None
        return ((0, self.num_rows),)

    def shape_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the shape of a rank's part; None if it does not store the tensor."""
        rows = self.rows_of(rank)
        if rows is None or not self.shape:
            return None if rows is None else ()
        return (sum(stop - start for start, stop in rows), *self.shape[1:])


@dataclass(frozen=True)
class Strategy:
    """The parameters of one model over ``world`` ranks of tensor parallelism."""

    model_type: str
    config_sha256: str
    world: int
    parameters: Mapping[str, Parameter]

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
            "world": {"tp": self.world, "pp": 1, "cp": 1},
        }
        lines = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(_fields(parameter))}" for name, parameter in self.parameters.items()
        )
        return (json.dumps(head, indent=1)[:-2] + ',\n "parameters": {\n' + lines + "\n }\n}\n").encode()

    def write(self, path: Path) -> None:
        """Write the file; an existing one is replaced as a whole."""
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
                f"{file}: layout_version: expected {LAYOUT_VERSION}, found {version}", param="layout_version"
            )
        world = _read_world(_section(reader, "world"))
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
            parameters[name] = _read_parameter(entry, world)
        strategy = cls(model.str("model_type"), checksum, world, parameters)
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
                    f"{file}: {show(name)}: name: expected a stored parameter of the same type and shape, found "
                    f"{show(parameter.name)}"
                )

    def check_model(self, config: ConfigReader, tensors: Mapping[str, TensorInfo], where: Path | str) -> None:
        """Check that the strategy is for a checkpoint: its config.json, and each of its tensors.

        Raises InvalidArgumentError (``strategy``), which names what differs.
        """
        checksum = config_checksum(config)
        if checksum != self.config_sha256:
            raise _mismatch(
                f"model.config_sha256: expected {checksum[:16]}..., that of {where}, found {self.config_sha256[:16]}..."
                ", so the strategy is for another model"
            )
        for name in sorted(tensors.keys() ^ self.parameters.keys()):
            kind = "is missing, but" if name in tensors else "is named, but no tensor of"
            raise _mismatch(f"parameters: {show(name)} {kind} {where} has it")
        for name, info in tensors.items():
            own = self.parameters[name]
            if (own.dtype, own.shape) != (info.dtype, info.shape):
                raise _mismatch(
                    f"parameters: {show(name)}: expected {info.dtype} of {list(info.shape)}, that of {where}, found "
                    f"{own.dtype} of {list(own.shape)}"
                )


def config_checksum(config: ConfigReader) -> str:
    """Return the SHA-256 of the values of a config.json, however they are written."""
    text = json.dumps(config.values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _mismatch(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"strategy: {message}", param="strategy")


def _fields(parameter: Parameter) -> dict[str, Any]:
    fields: dict[str, Any] = {"dtype": parameter.dtype, "shape": list(parameter.shape), "cut": parameter.cut}
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
        raise InvalidFileError(f"{reader.file}: {show(unknown)} is not a field; expected {', '.join(keys)}")


def _read_world(reader: ConfigReader) -> int:
    _check_keys(reader, ("tp", "pp", "cp"))
    for key in ("pp", "cp"):
        if reader.int(key, max=MAX_RANKS) != 1:
            raise UnsupportedError(
                f"{reader.file}: {key}: expected 1, found {reader.values[key]}; only tp cuts", param=key
            )
    return reader.int("tp", max=MAX_RANKS)


def _read_parameter(reader: ConfigReader, world: int) -> Parameter:
    cut = reader.one_of("cut", _CUTS)
    own = _FIELDS[cut]
    _check_keys(reader, ("dtype", "shape", "cut", *(() if own is None else (own,))))
    shape = reader.values.get("shape")
    if not isinstance(shape, list) or len(shape) > 8 or not all(is_integer(size, 0, _MAX_ROWS) for size in shape):
        raise reader.error("shape", "a list of at most 8 sizes", shape)
    base = Parameter(reader.str("dtype", max_len=16), tuple(shape), cut)
    if cut == "rows":
        return Parameter(base.dtype, base.shape, cut, ranges=_read_ranges(reader, base, world))
    if cut == "owner":
        return Parameter(base.dtype, base.shape, cut, rank=reader.int("rank", min=0, max=world - 1))
    if cut == "same":
        return Parameter(base.dtype, base.shape, cut, name=reader.str("name"))
    return base


def _read_ranges(reader: ConfigReader, parameter: Parameter, world: int) -> tuple[RowRanges, ...]:
    """Return the ranges of each rank: within a rank they ascend, and together they have every row."""
    value = reader.values.get("ranges")
    if not parameter.shape:
        raise reader.error("shape", "at least one dimension, because rows are cut", [])
    if not isinstance(value, list) or len(value) != world:
        raise reader.error("ranges", f"a list for each of {world} ranks", value)
    ranges = tuple(_read_rank(reader, rank, rows, parameter.num_rows) for rank, rows in enumerate(value))
    end = 0
    for start, stop in sorted(row_range for rows in ranges for row_range in rows):
        if start > end:
            break
        end = max(end, stop)
    if end != parameter.num_rows:
        raise InvalidFileError(f"{reader.file}: ranges: no rank has row {end} of {parameter.num_rows}", param="ranges")
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
