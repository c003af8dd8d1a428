"""``penstock inspect X``: show the contents of a bundle or a checkpoint folder, and the memory it needs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.cli.options import add_limit_options, add_ops_option, add_parser_of
from penstock.cli.progress import format_bytes
from penstock.errors import FileAccessError, InvalidArgumentError

__all__ = ["add_parser", "run"]

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
        "show the contents of a bundle or a checkpoint folder",
        "Show the contents of a bundle or a checkpoint folder, and the memory that a bundle needs to run.",
        "penstock inspect demo/demo.psm\npenstock inspect demo/demo.psm --verify --max-requests 32 --json",
    )
    parser.add_argument("path", metavar="X", help="a .psm bundle or a checkpoint folder")
    parser.add_argument(
        "--verify", action="store_true", help="check the checksum of every segment of a bundle (default: do not check)"
    )
    parser.add_argument(
        "--max-requests", type=int, default=1, metavar="N", help="plan memory for N requests (default: 1)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="plan memory for N tokens per step (default: 512)"
    )
    add_limit_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")
    add_ops_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the description."""
    path = Path(args.path)
    if path.is_dir():
        if args.verify:
            raise InvalidArgumentError(
                f"{path}: --verify applies to bundles only; a checkpoint folder has no checksums"
            )
        found = _folder(path)
        print(json.dumps(found) if args.json else _folder_text(found))
        return 0
    if not path.exists():
        raise FileAccessError(f"{path}: no such file or folder")
    found = _bundle(path, args)
    print(json.dumps(found) if args.json else _bundle_text(found))
    return 0


def _folder(path: Path) -> dict[str, Any]:
    from penstock.checkpoint.folder import Checkpoint

    checkpoint = Checkpoint.open(path)
    by_dtype: dict[str, dict[str, int]] = {}
    for name, tensor in checkpoint.tensors.items():
        entry = by_dtype.setdefault(str(tensor.dtype), {"tensors": 0, "values": 0, "bytes": 0})
        data = checkpoint.read(name)
        entry["tensors"] += 1
        entry["values"] += int(data.size)
        entry["bytes"] += int(data.nbytes)
    return {
        "path": str(path),
        "kind": "checkpoint",
        "network": checkpoint.config.optional_str("model_type"),
        "dtype": checkpoint.dtype,
        "scheme": checkpoint.scheme,
        "context_len": checkpoint.config.optional_int("max_position_embeddings"),
        "num_tensors": len(checkpoint.tensors),
        "num_values": sum(entry["values"] for entry in by_dtype.values()),
        "num_bytes": sum(entry["bytes"] for entry in by_dtype.values()),
        "by_dtype": by_dtype,
        "files": {stamp.name: stamp.num_bytes for stamp in checkpoint.files},
    }


def _folder_text(found: dict[str, Any]) -> str:
    scheme = f", quantized: {found['scheme']}" if found["scheme"] else ""
    context = "" if found["context_len"] is None else f", context of {found['context_len']:,} tokens"
    values = "stored values" if found["scheme"] else "parameters"  # two 4-bit parameters share a byte
    lines = [
        f"{found['path']}: a checkpoint folder",
        f"network        {found['network'] or 'not named'}{context}",
        f"type           {found['dtype']}{scheme}",
        f"{values:<15}{found['num_values']:,} in {found['num_tensors']} tensors, {format_bytes(found['num_bytes'])}",
    ]
    for dtype, entry in sorted(found["by_dtype"].items()):
        lines.append(
            f"  {dtype:<12} {entry['values']:>14,} in {entry['tensors']:>4} tensors, {format_bytes(entry['bytes'])}"
        )
    lines.append("files")
    lines += [f"  {name:<36} {format_bytes(num_bytes):>10}" for name, num_bytes in sorted(found["files"].items())]
    return "\n".join(lines)


def _bundle(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    from penstock.cli.options import limits_of
    from penstock.core import native
    from penstock.core.tokenizer import TOKENIZER_SEGMENT
    from penstock.graph.inspect import describe
    from penstock.runtime.native import plan_limits
    from penstock.runtime.program import ProgramLimits, kv_layout_of, pages_for

    wanted = limits_of(args, max_requests=args.max_requests, max_tokens=args.max_tokens)
    with native.Model.open(path, verify=args.verify) as model, native.Context() as context:
        context_len = wanted.context_len or model.info.context_len
        if context_len > model.info.context_len:
            raise InvalidArgumentError(
                f"context_len {context_len} is more than the model's {model.info.context_len}", param="context_len"
            )
        limits = ProgramLimits(
            max_tokens=wanted.max_tokens,
            max_requests=wanted.max_requests,
            max_rows=wanted.max_requests,
            num_pages=pages_for(context_len) * wanted.max_requests,
            context_len=context_len,
            kv_layout=kv_layout_of(wanted.kv_layout, model.info.scheme),
        )
        plan = plan_limits(model, context, limits)
        info = model.info
    found = {"path": str(path), "kind": "bundle", **asdict(info), **describe(path)}
    found["verified"] = bool(args.verify)
    tables = sum(one["bytes"] for one in found["segments"] if one["name"] == TOKENIZER_SEGMENT)
    total = {"tokenizer_bytes": tables, "total_bytes": plan.total_bytes + tables}
    found["plan"] = {"limits": asdict(limits), **asdict(plan), **total}
    return found


def _bundle_text(found: dict[str, Any]) -> str:
    plan, limits = found["plan"], found["plan"]["limits"]
    checked = "; all checksums match" if found["verified"] else ""
    lines = [
        f"{found['path']}: a bundle of {format_bytes(found['file_bytes'])}{checked}",
        f"network        {found['network']}, scheme {found['scheme']}",
        f"vocabulary     {found['vocab_size']:,} tokens",
        f"context        {found['context_len']:,} tokens, page groups: {_windows(found['page_windows'])}",
    ]
    if found["tail"]:
        lines.append(f"ends in        {found['tail']}, {found['tail_k']} ids per row: greedy answers only")
    lines += _described(found)
    lines += [
        f"plan           {limits['max_requests']} x {limits['context_len']:,} tokens in {limits['num_pages']:,} pages "
        f"({limits['kv_layout']}), steps of {limits['max_tokens']}",
    ]
    lines += [f"  {name:<12} {format_bytes(plan[key]):>10}" for name, key in _PLAN_PARTS]
    return "\n".join(lines)


def _windows(windows: Any) -> str:
    return ", ".join("whole context" if window == 0 else f"window of {window}" for window in windows) or "none"


def _described(found: dict[str, Any]) -> list[str]:
    each_token = format_bytes(found["weight_bytes_per_token"])
    lines = [
        f"parameters     {found['parameters']:,}, {format_bytes(found['weight_bytes'])} of weights, "
        f"{each_token} read for each token",
        f"linear layers  {found['bits_per_weight']:.2f} bits a weight, output head and scales included",
    ]
    lines += [f"  {name:<16} {format_bytes(size):>10}" for name, size in found["bytes_by_part"].items()]
    layouts = ", ".join(f"{name} {format_bytes(size)}" for name, size in found["bytes_by_layout"].items())
    lines.append(f"layouts        {layouts}")
    ops = [f"{count} {name}" for name, count in sorted(found["ops"].items(), key=lambda item: -item[1])]
    lines.append(f"ops            {sum(found['ops'].values())}: {', '.join(ops)}")
    lines.append("segments")
    lines += [f"  {s['name']:<24} {format_bytes(s['bytes']):>10}  crc32 {s['crc32']}" for s in found["segments"]]
    return lines
