"""Make an int8 network from a float32 one and samples of its inputs, and measure what it costs and gains."""

from __future__ import annotations

import fnmatch
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from penstock.core.native import Context
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.ir import Graph, Node
from penstock.networks.int8.judge import Arrays, OutputError, output_errors
from penstock.networks.int8.ranges import METHODS, Range, collect_ranges
from penstock.networks.int8.rewrite import Int8Weights, candidates, observed_values, rewrite
from penstock.networks.int8.samples import Sample, held_out, read_samples, sample_files
from penstock.networks.int8.stored import StoredNetwork
from penstock.networks.network import CapturedNetwork
from penstock.networks.predictor import Predictor, open_predictor

__all__ = ["Int8Options", "Int8Report", "check_arguments", "quantize_network"]

_RUNS: Final = 7
_PROPERTY: Final = "quantization"
Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Int8Options:
    """How a network becomes int8.

    ``ranges``: "mse" (the least squared error of rounding and clipping, as a histogram estimates it), "minmax",
    "percentile" (99.99 % of the magnitudes) or "kl".  ``keep``: patterns of the names of nodes that stay float32.
    ``max_error``: the largest relative error of an output, of root mean squares; nodes that add most to it stay float32
    until it holds.  None: any.
    """

    ranges: str = "mse"
    keep: tuple[str, ...] = ()
    max_error: float | None = None
    threads: int = 0


@dataclass(frozen=True)
class Int8Report:
    """The result of ``quantize_network``.

    ``num_int8`` of ``num_candidates`` nodes compute in int8, ``kept`` are the names of the others, and
    ``num_conversions`` nodes convert between types.  ``errors`` are of ``num_judged`` samples; ``ranges`` come from
    ``num_samples``.  Times are medians of a run of the first sample, in milliseconds.
    """

    num_int8: int
    num_candidates: int
    kept: tuple[str, ...]
    num_conversions: int
    num_samples: int
    num_judged: int
    errors: tuple[OutputError, ...]
    source_bytes: int
    num_bytes: int
    source_ms: float
    int8_ms: float


def quantize_network(
    source: str | os.PathLike[str] | CapturedNetwork, out: str | os.PathLike[str],
    calibration: str | os.PathLike[str] | None, options: Int8Options | None = None, tell: Tell | None = None,
    label: str | None = None,
) -> Int8Report:  # fmt: skip
    """Write the bundle ``out``: a float32 network with int8 convolutions and linears.

    ``source`` is a bundle, or a network that ``capture`` or ``read_network`` made.  ``calibration`` is a folder of
    samples, as ``read_samples`` takes it.  ``tell`` gets (done, total) of the networks that are measured for
    ``max_error``.  ``label``: the source in messages; None is the bundle's path or the network's name.  Raises
    InvalidArgumentError without samples, and UnsupportedError for a language model, for a network that is int8 already,
    and for one without convolutions and linears.
    """
    chosen = options or Int8Options()
    samples_folder = check_arguments(out, calibration, chosen)
    shown = label or (source.name if isinstance(source, CapturedNetwork) else os.fspath(source))
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = source.save(Path(folder) / "source.psm").path if isinstance(source, CapturedNetwork) else Path(source)
        if Path(out).resolve() == path.resolve():
            raise InvalidArgumentError(f"out: expected another file than the source, got {out}", param="out")
        network = StoredNetwork.open(path)
        _check_network(network.graph, shown)
        with open_predictor(path) as predictor:
            samples = read_samples(samples_folder, predictor.inputs)
        with Context() as context:
            return _Quantizer(network, path, samples, chosen, context, Path(folder)).run(Path(out), tell)


def check_arguments(
    out: str | os.PathLike[str], calibration: str | os.PathLike[str] | None, options: Int8Options
) -> Path:
    """Return the folder of samples after checking what needs no network; errors of ``quantize_network``."""
    if calibration is None:
        raise InvalidArgumentError(
            "calibration: expected a folder of samples of the inputs, got none. Ranges from other data would give a "
            "network whose accuracy nobody knows.",
            param="calibration",
            code="no_samples",
        )
    if options.ranges not in METHODS:
        raise InvalidArgumentError(
            f"ranges: expected {', '.join(METHODS)}, got {options.ranges!r}", param="ranges"
        )  # fmt: skip
    if options.max_error is not None and not options.max_error > 0:
        raise InvalidArgumentError(f"max_error: expected more than 0, got {options.max_error!r}", param="max_error")
    if Path(out).suffix != ".psm":
        raise InvalidArgumentError(f"out: expected a name that ends in .psm, got {Path(out).name}", param="out")
    sample_files(calibration)
    return Path(calibration)


def _check_network(graph: Graph, label: str) -> None:
    """Refuse a network that is int8 already, and one without nodes that have an int8 form."""
    if any(node.op == "conv_int8" or node.attrs.get("scheme") == "w8a8" for node in graph.nodes):
        raise UnsupportedError(f"{label}: expected a float32 network, got an int8 one", param="model")
    if not candidates(graph):
        raise UnsupportedError(
            f"{label}: expected convolutions or linears, got a network without ones that have an int8 form",
            param="model",
        )


class _Quantizer:
    def __init__(
        self, network: StoredNetwork, path: Path, samples: list[Sample], options: Int8Options, context: Context,
        folder: Path,
    ) -> None:  # fmt: skip
        self.network, self.path, self.options = network, path, options
        self.weights = Int8Weights(network, context)
        self.trial = folder / "trial.psm"
        self.calibrating, self.judging = held_out(samples)
        self.nodes = candidates(network.graph)
        self.kept = _named(self.nodes, options.keep)
        wanted = observed_values(network.graph, self.nodes)
        self.ranges: dict[str, Range] = collect_ranges(
            network, wanted, self.calibrating, options.ranges, options.threads
        )
        self.expected: dict[int, list[Arrays]] = {}

    def run(self, out: Path, tell: Tell | None) -> Int8Report:
        kept = set(self.kept)
        if self.options.max_error is not None:
            kept = self._within(self.options.max_error, kept, tell or (lambda done, total: None))
        result = self._network(kept)
        errors = self._measure(result, self.judging)
        num_int8 = len(self.nodes) - len(kept)
        recipe = {
            "scheme": "w8a8", "ranges": self.options.ranges, "samples": len(self.calibrating), "nodes": num_int8,
            "errors": [asdict(error) for error in errors],
        }  # fmt: skip
        result.graph.properties[_PROPERTY] = json.dumps(recipe)
        result.write(out, durable=True)
        source_ms, int8_ms = self._times(out)
        return Int8Report(
            num_int8, len(self.nodes),
            tuple(node.name for node in self.nodes if node.outputs[0] in kept),
            sum(node.op == "requantize" for node in result.graph.nodes),
            len(self.calibrating), len(self.judging), tuple(errors),
            self.path.stat().st_size, out.stat().st_size, source_ms, int8_ms,
        )  # fmt: skip

    def _network(self, kept: set[str]) -> StoredNetwork:
        names = {node.outputs[0] for node in self.nodes} - kept
        return rewrite(self.weights, names, self.ranges, self.options.ranges)

    def _within(self, limit: float, kept: set[str], tell: Tell) -> set[str]:
        """Return the fewest nodes, the worst first, that must stay float32 for the error to be within a limit."""
        free = [node.outputs[0] for node in self.nodes if node.outputs[0] not in kept]
        if self._error(kept) <= limit:
            return kept
        alone = {}
        for done, name in enumerate(free):
            tell(done, len(free))
            alone[name] = self._error({node.outputs[0] for node in self.nodes} - {name})
        order = sorted(free, key=lambda name: -alone[name])
        low, high = 1, len(order)
        while low < high:
            middle = (low + high) // 2
            if self._error(kept | set(order[:middle])) <= limit:
                high = middle
            else:
                low = middle + 1
        return kept | set(order[:low])

    def _error(self, kept: set[str]) -> float:
        """Return the largest error of an output, on the samples that give the ranges."""
        errors = self._measure(self._network(kept), self.calibrating)
        if not errors:
            raise InvalidArgumentError(
                "max_error: expected a network with outputs of floating-point numbers, got one without",
                param="max_error",
            )
        return max(error.relative for error in errors)

    def _measure(self, network: StoredNetwork, samples: Sequence[Sample]) -> list[OutputError]:
        if id(samples) not in self.expected:
            with open_predictor(self.path, threads=self.options.threads) as predictor:
                self.expected[id(samples)] = [predictor.predict(sample) for sample in samples]
        network.write(self.trial)
        with open_predictor(self.trial, threads=self.options.threads) as predictor:
            return output_errors(self.expected[id(samples)], [predictor.predict(sample) for sample in samples])

    def _times(self, out: Path) -> tuple[float, float]:
        """Return the median times of the source and of the result, which run in turns."""
        sample, threads = self.judging[0], self.options.threads
        with open_predictor(self.path, threads=threads) as source, open_predictor(out, threads=threads) as result:
            pairs = [(_time(source, sample), _time(result, sample)) for _ in range(_RUNS + 1)][1:]
        return statistics.median(first for first, _ in pairs), statistics.median(second for _, second in pairs)


def _time(predictor: Predictor, sample: Sample) -> float:
    start = time.perf_counter()
    predictor.run(sample)
    return 1e3 * (time.perf_counter() - start)


def _named(nodes: Sequence[Node], patterns: Sequence[str]) -> set[str]:
    """Return the first outputs of the nodes whose names match a pattern; each pattern must match one."""
    matched: set[str] = set()
    for pattern in patterns:
        own = {node.outputs[0] for node in nodes if fnmatch.fnmatchcase(node.name, pattern)}
        if not own:
            names = ", ".join(node.name for node in nodes[:5])
            raise InvalidArgumentError(
                f"keep: expected names of convolutions or linears, such as {names}, got {pattern!r}", param="keep"
            )
        matched |= own
    return matched
