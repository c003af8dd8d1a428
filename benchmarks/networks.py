"""Compares general networks in Penstock with ONNX Runtime and OpenVINO: speed, memory, load time and outputs.

    python -m benchmarks.networks [--peers PYTHON] [--rows resnet50,minilm] [--json FILE]
    python -m benchmarks.networks --file NET.onnx --size x/2=640 --size x/3=640 --peers PYTHON
    python -m benchmarks.networks --bundle NET-int8.psm --file NET-int8.onnx --peers PYTHON

PYTHON is the interpreter of an environment with NumPy and onnxruntime, openvino or both (default: this one); an engine
that it lacks is left out.  Networks are those of ``benchmarks.network_modules`` with random weights, exported by
PyTorch, and ONNX files by path, at the sizes given by ``--size`` (1 where none is).  All run in float32 on one input.

Each engine and network has a process of its own.  The processes of a network stay open and take turns of about a
quarter of a second; figures are medians over the turns and ratios those of pairs of turns, so that a change of the
machine's speed meets all.  Load is the time from the path to a network that is ready, in a fresh process and with the
file in the page cache; memory is the highest of the process, with its interpreter and libraries, after the runs.
Penstock opens the bundle of the same file.  ``error`` is the largest difference from ONNX Runtime's outputs (without it
Penstock's) over the largest magnitude among them, and must stay within 1e-4.  ``--bundle`` is run in place of the
bundle of ``--file``, such as one of int8 beside a file that onnxruntime quantized; then errors are shown only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from benchmarks.child import Child

TOLERANCE: Final = 1e-4
TURN_SECONDS: Final = 0.25
Arrays = dict[str, np.ndarray]


class Engine(Protocol):
    """A program with an open network."""

    def run(self) -> list[np.ndarray]:
        """Return the outputs in order, for the inputs of the process."""


class Penstock:
    def __init__(self, file: Path, inputs: Arrays, threads: int) -> None:
        self.predictor = importlib.import_module("penstock.networks.predictor").open_predictor(file, threads=threads)
        self.inputs = inputs

    def run(self) -> list[np.ndarray]:
        return list(self.predictor.run(self.inputs))


class OnnxRuntime:
    def __init__(self, file: Path, inputs: Arrays, threads: int) -> None:
        library = importlib.import_module("onnxruntime")
        options = library.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
        self.session = library.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self.inputs = inputs

    def run(self) -> list[np.ndarray]:
        return list(self.session.run(None, self.inputs))


class OpenVino:
    def __init__(self, file: Path, inputs: Arrays, threads: int) -> None:
        core = importlib.import_module("openvino").Core()
        network = core.read_model(str(file))
        network.reshape({name: list(array.shape) for name, array in inputs.items()})
        hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
        self.request = core.compile_model(network, "CPU", hints).create_infer_request()
        self.inputs = inputs

    def run(self) -> list[np.ndarray]:
        return list(self.request.infer(self.inputs).values())


ENGINES: Final[dict[str, tuple[str, Any]]] = {
    "penstock": ("penstock", Penstock),
    "onnxruntime": ("onnxruntime", OnnxRuntime),
    "openvino": ("openvino", OpenVino),
}
"""The package and the class of each engine."""


def highest_memory() -> float:
    """Return the highest memory of this process, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return float("nan")


def serve(name: str, file: Path, inputs: Path, threads: int) -> None:
    """Answer each line of standard input, "RUNS OUT.npz", with the milliseconds of a run and the highest memory."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # what libraries print goes to standard error
    os.dup2(2, 1)
    package, make = ENGINES[name]
    importlib.import_module(package)
    if name == "penstock":
        importlib.import_module("penstock.networks.predictor")
    with np.load(inputs) as stored:
        arrays = dict(stored)
    before, start = highest_memory(), time.perf_counter()
    engine: Engine = make(file, arrays, threads)
    load = time.perf_counter() - start
    outputs = engine.run()
    first = time.perf_counter() - start - load
    print(json.dumps({"load": 1e3 * load, "first": 1e3 * first, "before": before}), file=answers)
    for line in sys.stdin:
        runs, out = line.split()
        start = time.perf_counter()
        for _ in range(int(runs)):
            outputs = engine.run()
        seconds = (time.perf_counter() - start) / int(runs)
        memory = highest_memory()
        np.savez(out, *outputs)
        print(json.dumps({"milliseconds": 1e3 * seconds, "memory": memory}), file=answers)


def seeded_inputs(file: Path, sizes: Mapping[str, int]) -> Arrays:
    """Return inputs for an ONNX file: normal numbers, ids below 100, and masks of ones."""
    import onnx

    graph = onnx.load(str(file), load_external_data=False).graph
    random, constants = np.random.default_rng(0), {item.name for item in graph.initializer}
    arrays = {}
    for value in graph.input:
        if value.name in constants:
            continue
        dims = value.type.tensor_type.shape.dim
        shape = [
            sizes.get(f"{value.name}/{axis}", sizes.get(dim.dim_param, dim.dim_value or 1))
            for axis, dim in enumerate(dims)
        ]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if np.issubdtype(dtype, np.floating):
            arrays[value.name] = random.standard_normal(shape).astype(dtype)
        elif "mask" in value.name:
            arrays[value.name] = np.ones(shape, dtype)
        else:
            arrays[value.name] = random.integers(0, 100, shape).astype(dtype)
    return arrays


def difference(found: Path, expected: Path) -> float:
    """Return the largest difference of the outputs, over the largest magnitude of each (of at least 1)."""
    largest = 0.0
    with np.load(found) as left, np.load(expected) as right:
        for name in right.files:
            a, b = left[name].astype(np.float64), right[name].astype(np.float64)
            if a.shape != b.shape:
                return float("inf")
            if b.size:
                largest = max(largest, float(np.abs(a - b).max() / max(1.0, np.abs(b).max())))
    return largest


def compare(
    row: str, files: Mapping[str, Path], inputs: Arrays, folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of each engine for a network."""
    stored = folder / "inputs.npz"
    np.savez(stored, **inputs)  # type: ignore[arg-type]
    children, figures = {}, {}
    for name, file in files.items():
        python = sys.executable if name == "penstock" else args.peers
        own = [name, str(file), str(stored), str(args.threads)]
        child = Child(name, [python, "-m", "benchmarks.networks", "--side", *own], subprocess.DEVNULL)
        try:
            figures[name] = child.answer()
        except SystemExit:
            print(f"{row}: {name} failed", file=sys.stderr)
            continue
        children[name] = child
    outputs = {name: folder / f"{name}.npz" for name in children}
    runs = {
        name: max(1, int(1e3 * TURN_SECONDS / child.ask(f"2 {outputs[name]}")["milliseconds"]))
        for name, child in children.items()
    }
    times: dict[str, list[float]] = {name: [] for name in children}
    for number in range(args.turns):
        for name in children if number % 2 == 0 else reversed(children):
            answer = children[name].ask(f"{runs[name]} {outputs[name]}")
            times[name].append(answer["milliseconds"])
            figures[name]["memory"] = answer["memory"]
    reference = outputs.get("onnxruntime", outputs.get("penstock"))
    for name, child in children.items():
        child.close()
        ratios = [theirs / ours for ours, theirs in zip(times.get("penstock", []), times[name], strict=False)]
        figures[name] |= {
            "milliseconds": statistics.median(times[name]),
            "ratio": statistics.median(ratios) if ratios else None,
            "error": difference(outputs[name], reference) if reference else None,
        }
    return {name: figures[name] for name in children}


def rows_of(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the ONNX file of each network."""
    if not args.file or args.rows:
        from benchmarks.network_modules import MODULES, export

        for name in args.rows.split(",") if args.rows else MODULES:
            path = folder / f"{name}.onnx"
            if not path.exists():
                export(name, path)
            yield name, path
    for file in args.file:
        yield file.stem, file


def line_of(row: str, name: str, figure: Mapping[str, Any]) -> str:
    """Return a line of the Markdown table."""
    ratio = "" if figure["ratio"] is None else f"{figure['ratio']:.2f}"
    return (
        f"| {row} | {name} | {figure['milliseconds']:.2f} | {ratio} | {figure['load']:.1f} | {figure['first']:.1f} "
        f"| {figure['memory']:.0f} | {figure['error']:.1e} |"
    )


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Print the table while it is measured, and return its figures."""
    from penstock import read_network

    present = "import importlib.util as u; print(*[n for n in ('onnxruntime', 'openvino') if u.find_spec(n)])"
    peers = subprocess.run([args.peers, "-c", present], capture_output=True, text=True, check=True).stdout.split()
    sizes = {name: int(number) for name, _, number in (text.rpartition("=") for text in args.size)}
    print(f"{args.threads} threads, {args.turns} turns, load of the machine {os.getloadavg()[0]:.1f}\n")
    print("| network | engine | ms | of Penstock's time | load ms | first run ms | peak MB | error |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    found = {}
    for row, file in rows_of(args, folder):
        inputs = seeded_inputs(file, sizes)
        bundle = args.bundle or folder / f"{row}.psm"
        if args.bundle is None:
            read_network(file, sizes=sizes or None).save(bundle)
        files = {"penstock": bundle} | dict.fromkeys(peers, file)
        found[row] = compare(row, files, inputs, folder, args)
        for name, figure in found[row].items():
            print(line_of(row, name, figure), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", default=sys.executable, help="default: this interpreter")
    parser.add_argument("--rows", metavar="NAMES", help="networks, by commas (default: all, or none with --file)")
    parser.add_argument("--file", type=Path, action="append", default=[], metavar="NET.onnx", help="repeat for more")
    parser.add_argument("--bundle", type=Path, metavar="NET.psm", help="of Penstock, for a single --file")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=N", help="a named size, or INPUT/AXIS=N")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="keeps the files of the networks (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the figures")
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        name, file, inputs, threads = args.side
        serve(name, Path(file), Path(inputs), int(threads))
        return 0
    if args.bundle and (args.rows or len(args.file) != 1):
        parser.error("--bundle: expected one --file and no --rows")
    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        folder = args.folder or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(args, folder)
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "networks": found}, indent=1) + "\n")
    wrong = [
        f"{row}: {name}" for row, sides in found.items() for name, side in sides.items()
        if not args.bundle and not side["error"] <= TOLERANCE
    ]  # fmt: skip
    if wrong:
        print(f"outputs differ: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
