"""A model file in a servable worker: compared with its declaration, and run in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import InvalidFileError
from penstock.servables.api.manifest import model_from_json
from penstock.servables.process import worker_messages_pb2 as pb
from penstock.servables.process.columns import encode_rows, pad_rows, read_column, texts_of
from penstock.servables.process.failures import InvalidResultError, to_unicode
from penstock.servables.process.model_engines import ModelPort, open_engine
from penstock.servables.process.unit_program import to_spec_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.servables.api.specs import Spec

__all__ = ["LoadedModel"]


class LoadedModel:
    """A model file, opened, compared with its declaration and warmed up.

    Raises InvalidFileError if the file differs from the declaration, and UnsupportedError if nothing here runs it.
    """

    def __init__(self, start: pb.Start) -> None:
        self._manifest = model_from_json(start.model)
        path = Path(start.folder) / self._manifest.path
        self._engine = open_engine(path, self._manifest.threads)
        self._sizes: set[int] = set()
        self._check(path, "input", self._engine.inputs, self._manifest.inputs)
        self._check(path, "output", self._engine.outputs, self._manifest.outputs, may_omit=True)
        rules = self._manifest.rules
        for size in self._sizes:
            if rules.padded_sizes != (size,):
                raise InvalidFileError(
                    f"{path}: it accepts only batches of {size}; declare batch_size={size}, padded_sizes=({size},)",
                    param="padded_sizes",
                )
        self._names = [*self._manifest.outputs]
        self._warm_up(path)

    def _check(
        self, path: Path, kind: str, ports: Sequence[ModelPort], declared: Mapping[str, Spec], *, may_omit: bool = False
    ) -> None:
        """Compare names, datatypes and sizes with those that are declared; with ``may_omit`` some may be left out."""
        own = {port.name: port for port in ports}
        missing = [name for name in declared if name not in own]
        extra = [] if may_omit else [name for name in own if name not in declared]
        if missing or extra:
            raise InvalidFileError(
                f"{path}: the model's {kind}s are {', '.join(own)}, not {', '.join(declared)}", param=f"{kind}s"
            )
        for name, spec in declared.items():
            port = own[name]
            if port.datatype != spec.datatype:
                raise InvalidFileError(f"{path}: {kind} {name} is {port.datatype}, not {spec.datatype}", param=name)
            sizes = port.shape
            if len(sizes) != 1 + len(spec.shape) or any(
                -1 not in (a, b) and a != b for a, b in zip(sizes[1:], spec.shape, strict=True)
            ):
                raise InvalidFileError(
                    f"{path}: {kind} {name} has the shape {[*port.sizes]}, batch first, not {spec}", param=name
                )
            if kind == "input" and sizes[0] != -1:
                self._sizes.add(sizes[0])

    def _warm_up(self, path: Path) -> None:
        """Run a batch of zeros of each padded size, or of sizes 1 and ``max_size``."""
        rules = self._manifest.rules
        for size in rules.padded_sizes or (1, rules.max_size):
            try:
                shapes = self._engine.shapes(self._manifest.inputs, size)
                feeds = {
                    name: np.full(shapes[name], "" if spec.is_bytes else 0, spec.dtype)
                    for name, spec in self._manifest.inputs.items()
                }
                self._results(feeds, size)
            except Exception as error:
                raise InvalidFileError(f"{path}: a batch of {size} zeros fails: {str(error)[:500]}") from None

    def _results(self, feeds: dict[str, NDArray[Any]], size: int) -> list[NDArray[Any]]:
        outputs = self._engine.run(feeds, self._names)
        specs = self._manifest.outputs.items()
        return [to_spec_array(array, spec, size, name) for array, (name, spec) in zip(outputs, specs, strict=True)]

    def run(self, batch: pb.Batch, note: Callable[[int, int], None]) -> pb.Result:
        """Return the outputs of a batch, or its failure.  ``note(stage, instance)`` records the progress."""
        result, counts = pb.Result(), tuple(batch.counts)
        num_rows, size = sum(counts), batch.size
        note(0, -1)
        feeds = {}
        for (name, spec), column in zip(self._manifest.inputs.items(), batch.inputs, strict=True):
            whole = pad_rows(read_column(spec, column, counts), size - num_rows)
            feeds[name] = texts_of(whole) if spec.datatype == "TEXT" else whole
        try:
            outputs = self._results(feeds, size)
        except InvalidResultError as error:
            text = to_unicode(str(error), 500)
            result.failures.add(part=-1, instance=-1, stage=self._manifest.path, kind="result", text=text)
            return result
        except Exception as error:
            text, trace = type(error).__name__, to_unicode(str(error), 4000)
            result.failures.add(
                part=-1, instance=-1, stage=self._manifest.path, kind="exception", text=text, trace=trace
            )
            return result
        for array, spec in zip(outputs, self._manifest.outputs.values(), strict=True):
            column = result.outputs.add(data=encode_rows([array[:num_rows]], spec))
            if not spec.is_fixed:
                column.sizes.extend([*array.shape[1:]] * len(counts))
        return result
