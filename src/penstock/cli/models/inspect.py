"""``penstock inspect X``: show the contents of a bundle or a checkpoint folder, and the memory it needs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.model_source import downloaded_path
from penstock.cli.options import LIMIT_OPTIONS, add_options, add_parser_of
from penstock.cli.progress import ProgressLine, format_bytes, printable
from penstock.errors import FileAccessError, InvalidArgumentError
from penstock.file_kinds import is_gguf

if TYPE_CHECKING:
    from penstock.checkpoint.folder import Checkpoint
    from penstock.core.native import Model

__all__ = ["add_parser", "run"]

_LARGE_BYTES = 1 << 28
"""A bundle of this size takes long to verify."""
_PLAN_PARTS = (
    ("weights", "weight_bytes"),
    ("temporaries", "temporary_bytes"),
    ("scratch", "scratch_bytes"),
    ("keys, values", "kv_bytes"),
    ("logits", "logits_bytes"),
    ("tokenizer", "tokenizer_bytes"),
    ("total", "total_bytes"),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "inspect",
        "Show the contents of a bundle, a checkpoint folder or a GGUF file, and the memory that a bundle needs to run.",
        "penstock inspect demo/demo.psm\npenstock inspect demo/demo.psm --verify --max-requests 32 --json",
    )
    parser.add_argument(
        "path",
        metavar="MODEL",
        help="a .psm bundle, a checkpoint folder, a GGUF file, or ORG/NAME of a downloaded model",
    )
    parser.add_operand_flag(parser, "-m", "--model", metavar="MODEL", is_first=True)
    parser.add_argument(
        "--verify", action="store_true", help="check the checksum of every segment of a bundle (default: do not check)"
    )
    parser.add_argument(
        "--max-requests", type=int, default=1, metavar="N", help="plan memory for N requests (default: 1)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="plan memory for N tokens per step (default: 512)"
    )
    add_options(parser, *LIMIT_OPTIONS)
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")
    add_options(parser, "--ops")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the description."""
    path = Path(downloaded_path(args.path))
    if path.is_dir() or (is_gguf(path) and path.exists()):
        if args.verify:
            raise InvalidArgumentError(f"{path}: --verify applies to bundles only; a checkpoint has no checksums")
        details = _folder(path)
        print(json.dumps(details) if args.json else _folder_text(details))
        return 0
    if not path.exists():
        raise FileAccessError(f"{path}: no such file or folder")
    details = _bundle(path, args)
    as_text = _network_text if details["kind"] == "network" else _bundle_text
    print(json.dumps(details) if args.json else as_text(details))
    return 0


def _folder(path: Path) -> dict[str, Any]:
    from penstock.checkpoint.folder import Checkpoint

    checkpoint = Checkpoint.open(path)
    by_dtype: dict[str, dict[str, int]] = {}
    for name, tensor in checkpoint.tensors.items():
        kind = checkpoint.block_scheme(name) or str(tensor.dtype)
        entry = by_dtype.setdefault(kind, {"tensors": 0, "values": 0, "bytes": 0})
        if checkpoint.block_scheme(name) is None:
            checkpoint.read(name)  # refuses an element type that is not supported
        entry["tensors"] += 1
        entry["values"] += math.prod(tensor.shape)
        entry["bytes"] += checkpoint.stored_bytes(name)
    return {
        "path": str(path),
        "kind": "checkpoint",
        "network": checkpoint.config.optional_str("model_type"),
        "dtype": checkpoint.dtype,
        "scheme": checkpoint.scheme or checkpoint.own_block_scheme(),
        "recipe": _recipe(checkpoint.config.values),
        "context_len": checkpoint.config.optional_int("max_position_embeddings"),
        "num_tensors": len(checkpoint.tensors),
        "num_values": sum(entry["values"] for entry in by_dtype.values()),
        "num_bytes": sum(entry["bytes"] for entry in by_dtype.values()),
        "by_dtype": by_dtype,
        "files": {stamp.name: stamp.num_bytes for stamp in checkpoint.files},
        **(_memory(checkpoint) if is_gguf(path) else {}),
    }


def _recipe(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how `penstock quantize` chose the integers; None for other folders, and without calibration data."""
    section = config.get("quantization_config")
    recipe = section.get("recipe") if isinstance(section, dict) else None
    return recipe if isinstance(recipe, dict) else None


def _recipe_lines(recipe: dict[str, Any] | None) -> list[str]:
    if not recipe:
        return []
    figures = {key: value for key, value in recipe.items() if isinstance(value, (str, int, float))}
    words = [f"{key} {value}" for key, value in figures.items() if key != "method"]
    return [f"quantized by   {printable(str(figures.get('method')))}: {printable(', '.join(words))}"]


def _memory(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what memory holds of each tensor of a GGUF file."""
    from penstock.checkpoint.gguf.memory_types import tensor_groups

    groups = tensor_groups(checkpoint)
    return {
        "tensors": [asdict(group) for group in groups],
        "memory_bytes": sum(group.memory_bytes for group in groups),
    }


def _folder_text(details: dict[str, Any]) -> str:
    from penstock.quant.scheme import find_scheme

    scheme = f", quantized: {details['scheme']}" if details["scheme"] else ""
    context = "" if details["context_len"] is None else f", context of {details['context_len']:,} tokens"
    is_packed = details["scheme"] and not find_scheme(details["scheme"]).in_blocks
    values = "stored values" if is_packed else "parameters"  # two 4-bit parameters share a byte
    lines = [
        f"{details['path']}: a {'GGUF file' if is_gguf(Path(details['path'])) else 'checkpoint folder'}",
        f"network        {details['network'] or 'not named'}{context}",
        f"type           {details['dtype']}{scheme}",
        *_recipe_lines(details["recipe"]),
        f"{values:<15}{details['num_values']:,} in {details['num_tensors']:,} tensors, "
        f"{format_bytes(details['num_bytes'])}",
    ]
    for dtype, entry in sorted(details["by_dtype"].items()):
        noun = "tensor," if entry["tensors"] == 1 else "tensors,"
        lines.append(
            f"  {dtype:<12} {entry['values']:>14,} in {entry['tensors']:>5,} {noun} {format_bytes(entry['bytes'])}"
        )
    if "tensors" in details:
        lines += _tensor_lines(details)
    lines.append("files")
    lines += [f"  {name:<36} {format_bytes(num_bytes):>10}" for name, num_bytes in sorted(details["files"].items())]
    return "\n".join(lines)


def _tensor_lines(details: dict[str, Any]) -> list[str]:
    """Return a table of the tensors of a GGUF file: their types and sizes there and in memory."""
    share = details["memory_bytes"] / max(1, details["num_bytes"])
    rows = [
        (
            group["name"],
            " x ".join(f"{size}" for size in group["shape"]),
            group["file_type"],
            group["memory_type"],
            f"{group['num_tensors']}",
            format_bytes(group["file_bytes"]),
            format_bytes(group["memory_bytes"]),
        )
        for group in details["tensors"]
    ]
    head = ("tensors", "shape", "in the file", "in memory", "count", "file", "memory")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    widths[0] += 2
    lines = [f"memory         {format_bytes(details['memory_bytes'])} of weights, {share:.2f} of those in the file"]
    for row in (head, *(("  " + row[0], *row[1:]) for row in rows)):
        cells = [f"{cell:<{width}}" for cell, width in zip(row[:4], widths[:4], strict=True)]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[4:], widths[4:], strict=True)]
        lines.append("  ".join(cells))
    lines += [
        f"  {group['name']} becomes float32, because {group['reason']}"
        for group in details["tensors"]
        if group["reason"]
    ]
    return lines


def _network(path: Path, model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Return the contents of a general network, whose memory depends on the inputs of each run."""
    from penstock.graph.inspect import describe

    return {"path": str(path), "kind": "network", **describe(path), "verified": bool(args.verify)} | {
        "format_minor": model.info.format_minor
    }


def _network_text(details: dict[str, Any]) -> str:
    checked = "; all checksums match" if details["verified"] else ""
    lines = [
        f"{details['path']}: a bundle of {format_bytes(details['file_bytes'])}{checked}",
        f"network        {details['network']}, a general network",
    ]
    for kind in ("inputs", "outputs"):
        lines.append(kind)
        lines += [f"  {v['name']:<24} {v['dtype']:<5} [{v['sizes'].replace(',', ', ')}]" for v in details[kind]]
    if details["sizes"]:
        lines.append("sizes")
        for size in details["sizes"]:
            step = f", a multiple of {size['multiple']}" if size["multiple"] > 1 else ""
            lines.append(f"  {size['name']:<24} {size['min']:,} to {size['max']:,}{step}")
    lines.append(f"parameters     {details['parameters']:,}, {format_bytes(details['weight_bytes'])} of weights")
    layouts = ", ".join(f"{name} {format_bytes(size)}" for name, size in details["bytes_by_layout"].items())
    lines.append(f"layouts        {layouts or 'none'}")
    int8 = details["int8"]
    if int8["convolutions"] or int8["linears"]:
        lines.append(
            f"int8           {int8['convolutions']} convolutions and {int8['linears']} linears, "
            f"{int8['conversions']} conversions; {int8['float_nodes']} stay float32"
        )
    return "\n".join([*lines, *_ops_and_segments(details)])


def _bundle(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    from penstock.cli.options import limits_of
    from penstock.config import ConfigReader
    from penstock.core import native
    from penstock.core.predict import GENERAL_NETWORK
    from penstock.core.tokenizer import TOKENIZER_SEGMENT
    from penstock.graph.inspect import describe
    from penstock.runtime.build import Progress
    from penstock.runtime.native import plan_limits
    from penstock.runtime.program import ProgramLimits, pages_for
    from penstock.runtime.stored_kv import kv_layout_in

    program_limits = limits_of(args, max_requests=args.max_requests, max_tokens=args.max_tokens)
    with ProgressLine() as line:
        if args.verify and path.stat().st_size >= _LARGE_BYTES:
            line(Progress("verify"))
        opened = native.Model.open(path, verify=args.verify)
    if opened.info.kind == GENERAL_NETWORK:
        with opened as model:
            return _network(path, model, args)
    with opened as model, native.Context() as context:
        context_len = program_limits.context_len or model.info.context_len
        if context_len > model.info.context_len:
            raise InvalidArgumentError(
                f"context_len {context_len} is more than the model's {model.info.context_len}", param="context_len"
            )
        limits = ProgramLimits(
            max_tokens=program_limits.max_tokens,
            max_requests=program_limits.max_requests,
            max_rows=program_limits.max_requests,
            num_pages=pages_for(context_len) * program_limits.max_requests,
            context_len=context_len,
            kv_layout=kv_layout_in(program_limits.kv_layout, model),
        )
        plan = plan_limits(model, context, limits)
        info, config = model.info, model.segment("config.json")
        recipe = _recipe(ConfigReader.parse(bytes(config)).values) if config else None
    details = {"path": str(path), "kind": "bundle", **asdict(info), **describe(path)}
    details["recipe"] = recipe
    details["verified"] = bool(args.verify)
    tables = sum(segment["bytes"] for segment in details["segments"] if segment["name"] == TOKENIZER_SEGMENT)
    total = {"tokenizer_bytes": tables, "total_bytes": plan.total_bytes + tables}
    details["plan"] = {"limits": asdict(limits), **asdict(plan), **total}
    return details


def _bundle_text(details: dict[str, Any]) -> str:
    plan, limits = details["plan"], details["plan"]["limits"]
    checked = "; all checksums match" if details["verified"] else ""
    lines = [
        f"{details['path']}: a bundle of {format_bytes(details['file_bytes'])}{checked}",
        f"network        {details['network']}, scheme {details['scheme']}",
        f"vocabulary     {details['vocab_size']:,} tokens",
        f"context        {details['context_len']:,} tokens, page groups: {_windows(details['page_windows'])}",
    ]
    lines += _recipe_lines(details["recipe"])
    if details["tail"]:
        lines.append(f"ends in        {details['tail']}, {details['tail_k']} ids per row: greedy answers only")
    lines += _bundle_lines(details)
    lines += [
        f"plan           {limits['max_requests']} x {limits['context_len']:,} tokens in {limits['num_pages']:,} pages "
        f"({limits['kv_layout']}), steps of {limits['max_tokens']}",
    ]
    lines += [f"  {name:<12} {format_bytes(plan[key]):>10}" for name, key in _PLAN_PARTS]
    return "\n".join(lines)


def _windows(windows: Any) -> str:
    return ", ".join("whole context" if window == 0 else f"window of {window}" for window in windows) or "none"


def _bundle_lines(details: dict[str, Any]) -> list[str]:
    each_token = format_bytes(details["weight_bytes_per_token"])
    lines = [
        f"parameters     {details['parameters']:,}, {format_bytes(details['weight_bytes'])} of weights, "
        f"{each_token} read for each token",
        f"linear layers  {details['bits_per_weight']:.2f} bits per weight, output head and scales included",
    ]
    lines += [f"  {name:<16} {format_bytes(size):>10}" for name, size in details["bytes_by_part"].items()]
    layouts = ", ".join(f"{name} {format_bytes(size)}" for name, size in details["bytes_by_layout"].items())
    lines.append(f"layouts        {layouts}")
    return lines + _ops_and_segments(details)


def _ops_and_segments(details: dict[str, Any]) -> list[str]:
    ops = [f"{count} {name}" for name, count in sorted(details["ops"].items(), key=lambda item: -item[1])]
    return [
        f"ops            {sum(details['ops'].values())}: {', '.join(ops)}",
        "segments",
        *(f"  {s['name']:<24} {format_bytes(s['bytes']):>10}  crc32 {s['crc32']}" for s in details["segments"]),
    ]
