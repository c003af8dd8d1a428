"""``penstock predict NET.psm``: run the bundle of a general network over arrays in files."""

from __future__ import annotations

import argparse
import json
import math
import time
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import add_options, add_parser_of
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError

if TYPE_CHECKING:
    from penstock.core.predict import NetworkSize, NetworkValue
    from penstock.networks.node_times import NodeTime
    from penstock.networks.predictor import Predictor

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "predict",
        "Run a network that is no language model, from the bundle that penstock export or penstock.capture made. "
        "Inputs are .npy files. Without one, an input is zeros of the sizes that --size gives.",
        "penstock predict net.psm --input x=image.npy --output result.npz\n"
        "penstock predict net.psm --size B=8 --runs 20",
    )
    parser.add_argument("model", metavar="NET.psm", help="the bundle of a general network")
    parser.add_argument(
        "-i",
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]FILE.npy",
        help="an input; the name may be left out if there is one; repeat for more (default: zeros)",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.npz",
        help="write all outputs by name, or of one output FILE.npy (default: none)",
    )
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=N",
        help="a size of inputs that have no file; repeat for more (default: the example's, or the least)",
    )
    parser.add_argument(
        "--runs", type=int, default=1, metavar="N", help="times to run; the median is shown (default: 1)"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="show the time of each op and of the ten slowest nodes in as many more runs (default: off)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")
    add_options(parser, "--threads", "--ops")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the network and describe its outputs."""
    import numpy as np

    from penstock.networks.predictor import open_predictor

    if args.runs < 1:
        raise InvalidArgumentError(f"--runs: expected 1 or more, got {args.runs}", param="runs")
    if Path(args.model).suffix.lower() == ".onnx":
        raise InvalidArgumentError(
            f"NET.psm: expected a bundle, got {args.model}; make one with: penstock export {args.model} NET.psm",
            param="model",
        )
    with open_predictor(args.model, threads=args.threads or 0) as predictor:
        if args.output is not None:
            _check_output(Path(args.output), len(predictor.outputs))
        arrays = _inputs(args, predictor)
        seconds = []
        for _ in range(args.runs):
            start = time.perf_counter()
            outputs = predictor.predict(arrays)
            seconds.append(time.perf_counter() - start)
        times = predictor.profile(arrays, args.runs) if args.profile else []
    if args.output is not None:
        _write(Path(args.output), outputs)
    milliseconds = 1e3 * float(np.median(seconds))
    if args.json:
        answer = {"milliseconds": milliseconds, "outputs": {k: _finite(_summary(v)) for k, v in outputs.items()}}
        print(json.dumps(answer | ({"nodes": [asdict(item) for item in times]} if args.profile else {})))
        return 0
    for name, array in outputs.items():
        values = _summary(array)
        line = ", ".join(f"{key} {values[key]:.6g}" for key in ("min", "mean", "max") if values[key] is not None)
        print(f"{name}: {values['dtype']} {values['shape']}{', ' if line else ''}{line}")
    print(f"{milliseconds:.2f} ms" + (f", the median of {args.runs} runs" if args.runs > 1 else ""))
    if times:
        _print_times(times)
    return 0


def _print_times(times: list[NodeTime]) -> None:
    from penstock.networks.node_times import by_op

    whole = sum(item.milliseconds for item in times) or 1.0
    for title, rows in (("op", by_op(times)), ("slowest nodes", times[:10])):
        print(f"\n{title:40}       ms   share  nodes")
        for item in rows:
            name = f"{item.op} {item.name}".strip()
            print(f"{name[:40]:40} {item.milliseconds:8.3f}  {item.milliseconds / whole:5.1%}  {item.count:5}")


def _inputs(args: argparse.Namespace, predictor: Predictor) -> dict[str, Any]:
    import numpy as np

    from penstock.core.predict import NUMPY_DTYPES

    names = [value.name for value in predictor.inputs]
    arrays: dict[str, Any] = {}
    for text in args.input:
        name, equals, path = text.partition("=")
        if not equals:
            if len(names) != 1:
                raise InvalidArgumentError(f"--input: expected NAME=FILE.npy, one of {', '.join(names)}", param="input")
            name, path = names[0], text
        if name not in names:
            raise InvalidArgumentError(f"--input: expected one of {', '.join(names)}, got {name!r}", param="input")
        if name in arrays:
            raise InvalidArgumentError(f"--input: expected one file for {name}, got two", param="input")
        arrays[name] = _read(Path(path))
    sizes = _sizes(args.size, predictor)
    for value in predictor.inputs:
        if value.name in arrays:
            _check_sizes(value, arrays[value.name], sizes)
            continue
        shape = predictor.shape_of(value, sizes)
        try:
            arrays[value.name] = np.zeros(shape, NUMPY_DTYPES[value.dtype])
        except (MemoryError, ValueError, OverflowError) as error:
            raise InvalidArgumentError(
                f"--size: {value.name}: expected an input that fits into memory, got {list(shape)}", param="size"
            ) from error
    return arrays


def _sizes(texts: list[str], predictor: Predictor) -> dict[str, int]:
    sizes: dict[str, int] = {}
    known = _known_sizes(predictor)
    for text in texts:
        name, number = _size(text)
        if name not in known:
            own = {size.name: shown for shown, size in known.items()}  # H, which comes behind H_8
            names = ", ".join(own.values()) or "none, as all sizes are fixed"
            raise InvalidArgumentError(f"--size: expected {names}, got {name!r}", param="size")
        size = known[name]
        step = size.multiple if name != size.name else 1
        if size.name in sizes:
            raise InvalidArgumentError(f"--size: expected one number for {name}, got two", param="size")
        if not size.min <= number <= size.max or number % size.multiple:
            steps = f" in steps of {size.multiple}" if size.multiple > 1 else ""
            raise InvalidArgumentError(
                f"--size: {name}: expected {size.min} to {size.max}{steps}, got {number}", param="size"
            )
        sizes[size.name] = number // step
    return sizes


def _known_sizes(predictor: Predictor) -> dict[str, NetworkSize]:
    """Return the sizes by name, also by that of one in steps: H, of which the inputs have ``8*H_8``."""
    known = {size.name: size for size in predictor.sizes}
    axes = {text for value in predictor.inputs for text in value.sizes}
    for size in predictor.sizes:
        name, _, step = size.name.rpartition("_")
        if step.isdecimal() and f"{step}*{size.name}" in axes and size.multiple == 1:
            own = replace(size, min=size.min * int(step), max=size.max * int(step), multiple=int(step))
            known.setdefault(name, own)
    return known


def _check_sizes(value: NetworkValue, array: Any, sizes: dict[str, int]) -> None:
    """Compare the sizes that the command line gives with those of an input's file."""
    for axis, (text, actual) in enumerate(zip(value.sizes, array.shape, strict=False)):
        step, _, name = text.rpartition("*")
        if name not in sizes or not (step.isdecimal() or name == text):
            continue
        expected = sizes[name] * int(step or 1)
        if expected != actual:
            raise InvalidArgumentError(
                f"--size: {text}: expected {actual}, as axis {axis} of {value.name} is, got {expected}", param="size"
            )


def _size(text: str) -> tuple[str, int]:
    name, equals, number = text.rpartition("=")
    if not equals or not number.isdecimal() or len(number) > 18:
        raise InvalidArgumentError(f"--size: expected NAME=N, got {text!r}", param="size")
    return name, int(number)


def _read(path: Path) -> Any:
    import numpy as np

    try:
        with path.open("rb") as file:  # numpy leaves a damaged archive open
            array = np.load(file, allow_pickle=False)
    except MemoryError as error:
        raise InvalidFileError(f"{path}: expected an array that fits into memory", param="input") from error
    except OSError as error:
        raise FileAccessError(f"{path}: {error.strerror or error}", param="input") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidFileError(f"{path}: expected a .npy file of numbers, got another", param="input") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise InvalidFileError(f"{path}: expected a .npy file, got an archive of arrays (.npz)", param="input")
    return array


def _check_output(path: Path, count: int) -> None:
    if path.suffix not in (".npz", ".npy") or (path.suffix == ".npy" and count != 1):
        raise InvalidArgumentError(
            f"--output: expected FILE.npz, or FILE.npy of a network with one output, got {path}", param="output"
        )


def _write(path: Path, outputs: dict[str, Any]) -> None:
    import numpy as np

    try:
        if path.suffix == ".npy":
            np.save(path, next(iter(outputs.values())), allow_pickle=False)
        else:
            with zipfile.ZipFile(path, "w", allowZip64=True) as archive:  # np.savez takes no output named "file"
                for name, array in outputs.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
    except OSError as error:
        raise FileAccessError(f"{path}: {error.strerror or error}", param="output") from error


def _summary(array: Any) -> dict[str, Any]:
    shape = list(array.shape)
    if array.size == 0:
        return {"dtype": str(array.dtype), "shape": shape, "min": None, "mean": None, "max": None}
    numbers = {"min": float(array.min()), "mean": float(array.mean()), "max": float(array.max())}
    return {"dtype": str(array.dtype), "shape": shape, **numbers}


def _finite(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a summary with None for NaN and infinity, which JSON lacks."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}
