"""A checkpoint with a network's own tensors, and back: where the network's ``tensor_sources`` name whole rows.

GPT-NeoX, BLOOM and Falcon, for example, store q, k and v of a head together, and the network has them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.checkpoint.fused_layout import RowRange, Target
from penstock.checkpoint.sources import Source
from penstock.checkpoint.tensor_file import TensorInfo
from penstock.config import OWN_NAMES, ConfigReader, show, show_tensors
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["Arrangement", "join_rows_of_tensors", "split_into_parameters"]

Table = Mapping[str, tuple[Source, ...]]
"""The sources of the parameters that are not the tensor of their name."""


@dataclass(frozen=True)
class Arrangement:
    """The content of a folder in another layout: the values of config.json, and its tensors."""

    config: dict[str, Any]
    targets: dict[str, Target]


def split_into_parameters(
    config: ConfigReader, tensors: Mapping[str, TensorInfo], names: Iterable[str], sources: Table
) -> Arrangement:
    """Return a network's parameters ``names`` as tensors; those that it does not read are left out.

    Raises UnsupportedError (``layout``), which names a parameter that is not rows of tensors, and InvalidFileError for
    a tensor that is missing.
    """
    targets = {}
    for name in names:
        pieces = []
        for source in sources.get(name, (Source(name),)):
            _check_rows(name, source)
            info = tensors.get(source.tensor)
            if info is None:
                raise _missing(config, source.tensor)
            ranges = source.rows or ((0, info.shape[0]),)
            pieces += [RowRange(source.tensor, start, stop) for start, stop in ranges]
        first = tensors[pieces[0].name]
        num_rows = sum(piece.stop - piece.start for piece in pieces)
        targets[name] = Target(first.dtype, (num_rows, *first.shape[1:]), tuple(pieces))
    return Arrangement({**config.values, OWN_NAMES: True}, targets)


def join_rows_of_tensors(
    config: ConfigReader, tensors: Mapping[str, TensorInfo], names: Iterable[str], sources: Table
) -> Arrangement:
    """Return the tensors that a network's parameters, stored as such, come from: what ``split_into_parameters`` split.

    Raises the same errors.
    """
    rows: dict[str, list[tuple[int, RowRange]]] = {}
    for name in names:
        info, end = tensors.get(name), 0
        if info is None:
            raise _missing(config, name)
        for source in sources.get(name, (Source(name),)):
            _check_rows(name, source)
            for start, stop in source.rows or ((0, info.shape[0]),):
                rows.setdefault(source.tensor, []).append((start, RowRange(name, end, end + stop - start)))
                end += stop - start
    targets = {}
    for tensor, ranges in rows.items():
        end = 0
        for start, piece in sorted(ranges, key=lambda row: row[0]):
            if start != end or piece.stop > tensors[piece.name].shape[0]:
                raise UnsupportedError(f"layout: {show(tensor)} has rows that no parameter has", param="layout")
            end += piece.stop - piece.start
        first = tensors[ranges[0][1].name]
        pieces = tuple(piece for _, piece in sorted(ranges, key=lambda row: row[0]))
        targets[tensor] = Target(first.dtype, (end, *first.shape[1:]), pieces)
    values = {key: value for key, value in config.values.items() if key != OWN_NAMES}
    return Arrangement(values, targets)


def _missing(config: ConfigReader, tensor: str) -> InvalidFileError:
    return InvalidFileError(
        f"{config.file}: the checkpoint lacks {show_tensors([tensor])}, which the network reads", param=tensor
    )


def _check_rows(name: str, source: Source) -> None:
    if source != Source(source.tensor, source.rows):
        raise UnsupportedError(
            f"layout: {show(name)}: expected rows of {show(source.tensor)}, got another form of it", param="layout"
        )
