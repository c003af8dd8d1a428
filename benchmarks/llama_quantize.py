"""The quality of ``penstock quantize`` beside llama.cpp's Q4_K_S with an importance matrix, at no more bytes.

    python -m benchmarks.llama_quantize WORK --model demo/model|FILE.gguf --calibration FILE --text FILE
        --llama /path/to/python [--tokens 65536] [--windows 40] [--methods gptq,awq+gptq] [--budget-methods gptq]
        [--head q6_k]

Both start from one GGUF file of floats and one importance matrix, which ``penstock quantize --imatrix-out`` writes.
A folder is converted; a quantized GGUF file is dequantized, and its columns are multiplied by random factors that the
norm, up or v before them is divided by: the function stays, but the values lie on no grid of GGUF, which would favour
the types that have it.  llama.cpp quantizes through ``llama_model_quantize``, so another Python needs llama-cpp-python.

Each method is measured as ``w4a8`` and, where that has more bytes than Q4_K_S, as a mix with ``--budget`` too: rows
that are no multiple of 256 and the head make Q4_K_S differ from 4.5 bits.  One evaluator, ``penstock eval``, gives KL
from the floats.  ``llama.cpp`` lines are the same KL from the logits that llama.cpp itself computes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

import penstock
from penstock.calibration.divergence import compare_rows
from penstock.runtime.program import ProgramLimits

Floats = NDArray[np.float32]
WINDOW = 512
KINDS = {"attn_norm": ("attn_q", "attn_k", "attn_v"), "ffn_norm": ("ffn_gate", "ffn_up")}
SIDE = Path(__file__).with_name("llama_quantize_side.py")


def penstock_command(*words: str) -> str:
    """Run a command of this Penstock, and return its output."""
    shown = " ".join(words)
    print(f"$ penstock {shown}", file=sys.stderr, flush=True)
    return subprocess.run(
        [sys.executable, "-m", "penstock", *words], check=True, stdout=subprocess.PIPE
    ).stdout.decode()


def factors(rng: np.random.Generator, size: int) -> Floats:
    return np.exp(rng.uniform(-0.25, 0.25, size)).astype(np.float32)


def scale_rows(tensors: dict[str, Floats], name: str, by: Floats) -> None:
    for part in ("weight", "bias"):
        if f"{name}.{part}" in tensors:
            value = tensors[f"{name}.{part}"]
            tensors[f"{name}.{part}"] = value * (by[:, None] if value.ndim == 2 else by)


def leave_grid(tensors: dict[str, Floats], num_layers: int, head_dim: int) -> None:
    """Multiply columns by random factors, and what makes them by the inverse."""
    rng = np.random.default_rng(0)
    for prefix in (f"blk.{layer}." for layer in range(num_layers)):
        for norm, readers in KINDS.items():
            by = factors(rng, len(tensors[f"{prefix}{norm}.weight"]))
            tensors[f"{prefix}{norm}.weight"] /= by
            for reader in readers:
                tensors[f"{prefix}{reader}.weight"] *= by
        by = factors(rng, len(tensors[f"{prefix}ffn_up.weight"]))
        scale_rows(tensors, f"{prefix}ffn_up", 1 / by)
        tensors[f"{prefix}ffn_down.weight"] *= by
        by = factors(rng, len(tensors[f"{prefix}attn_v.weight"]))
        scale_rows(tensors, f"{prefix}attn_v", 1 / by)
        out = tensors[f"{prefix}attn_output.weight"]
        heads = by.reshape(-1, head_dim)
        out *= np.repeat(heads, out.shape[1] // by.size, axis=0).reshape(-1)


def write_floats(source: Path, out: Path) -> None:
    """Write a quantized GGUF file in float16, off the grids of its types."""
    reader = gguf.GGUFReader(source)
    tensors = {own.name: gguf.quants.dequantize(own.data, own.tensor_type).copy() for own in reader.tensors}
    arch = str(reader.fields["general.architecture"].contents())
    heads = int(reader.fields[f"{arch}.attention.head_count"].contents())
    hidden = int(reader.fields[f"{arch}.embedding_length"].contents())
    key_length = reader.fields.get(f"{arch}.attention.value_length")
    head_dim = hidden // heads if key_length is None else int(key_length.contents())
    leave_grid(tensors, int(reader.fields[f"{arch}.block_count"].contents()), head_dim)
    writer = gguf.GGUFWriter(out, arch)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name, value in tensors.items():
        writer.add_tensor(name, value.astype(np.float16) if value.ndim == 2 else value.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_once(out: Path, write: Callable[[Path], object]) -> Path:
    """Write a file unless it exists; it appears whole or not at all."""
    if not out.exists():
        partial = out.with_suffix(f".partial{out.suffix}")
        partial.unlink(missing_ok=True)
        write(partial)
        partial.replace(out)
    return out


def float_file(model: Path, out: Path) -> Path:
    if model.is_dir():
        return write_once(out, lambda part: penstock_command("convert", str(model), str(part), "--dtype", "f32"))
    return write_once(out, lambda part: write_floats(model, part))


def importance(path: Path, out: Path) -> Path:
    """Write the means of an importance matrix by the names of GGUF, for a process without the package gguf."""
    tensors = {own.name: own.data for own in gguf.GGUFReader(path).tensors}
    means = {}
    for name, sums in tensors.items():
        if name.endswith(".in_sum2"):
            counts = np.maximum(tensors[name.replace(".in_sum2", ".counts")], 1)
            means[name.removesuffix(".in_sum2")] = (sums / counts).astype(np.float32).reshape(-1)
    np.savez(out, **means)
    return out


def quantize_rival(args: argparse.Namespace, floats: Path, matrix: Path, out: Path) -> None:
    means = importance(matrix, args.work / "imatrix.npz")
    subprocess.run([args.llama, SIDE, "quantize", floats, out, means], check=True)


def judge(model: Path, floats: Path, args: argparse.Namespace, scheme: str = "") -> Mapping[str, Any]:
    """Return what ``penstock eval`` says, with bytes of keys and values in float32 on both sides."""
    own = ["--scheme", scheme] if scheme else []
    return json.loads(
        penstock_command(
            "eval", str(model), *own, "--against", str(floats), "--against-scheme", "f32", "--kv-cache", "f32",
            "--against-kv-cache", "f32", "--no-speed", "--json", "--text", str(args.text), "--window", str(WINDOW),
            "--max-windows", str(args.windows),
        )
    )  # fmt: skip


def line(name: str, report: Mapping[str, Any]) -> None:
    """Print a row of the table."""
    own, apart = report["model"], report["divergence"]
    kl, change = apart["mean"], apart["nll_change"]["value"]
    error = "" if kl["standard_error"] is None else f" ± {kl['standard_error']:.4f}"  # of few windows there is none
    print(
        f"| {name} | {own['weight_bytes']:,} | {own['bits_per_weight']:.3f} "
        f"| {kl['value']:.4f}{error} "
        f"| {100 * apart['same_top']['value']:.1f} % | {100 * np.expm1(change):+.2f} % |",
        flush=True,
    )


def check_logits(floats: Path, quantized: Path, args: argparse.Namespace) -> None:
    """Print KL of llama.cpp's own logits from float ones, over the first windows."""
    llm = penstock.LLM(floats, scheme="f32", use_cache=False, limits=ProgramLimits(kv_layout="f32"))
    try:
        ids = llm.tokenizer.encode(args.text.read_text("utf-8"))
        windows = [ids[at : at + WINDOW] for at in range(0, args.logit_windows * WINDOW, WINDOW)]
        (args.work / "ids.json").write_text(json.dumps(windows))
        for name, file in (("floats", floats), ("Q4_K_S", quantized)):
            out = args.work / f"logits-{name}.npy"
            subprocess.run([args.llama, SIDE, "logits", file, args.work / "ids.json", out], check=True)
            rows = np.load(out, mmap_mode="r")
            found = [
                compare_rows(np.asarray(own[:-1], np.float32), llm.logits(each)[:-1], np.array(each[1:]))
                for each, own in zip(windows, rows, strict=True)
            ]
            mean = float(np.mean([kl for one in found for kl in one[2]]))
            same = float(np.mean([top for one in found for top in one[3]]))
            print(f"llama.cpp's logits of {name} from f32: KL {mean:.4f}, same likeliest token {100 * same:.1f} %")
    finally:
        llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="a folder, in which a second run continues")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--llama", default=sys.executable, help="the Python that has llama-cpp-python")
    parser.add_argument("--head", help="the scheme of the head of each method, q6_k (default: 8 bits)")
    parser.add_argument("--tokens", default="65536")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--logit-windows", type=int, default=2)
    parser.add_argument("--methods", default="imatrix,gptq,awq+gptq")
    parser.add_argument("--budget-methods", default="gptq", help="methods of a mix with the bytes of Q4_K_S")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    floats = float_file(args.model, args.work / "floats.gguf")
    data = ["--calibration", str(args.calibration), "--calibration-tokens", args.tokens]
    matrix, head = args.work / "imatrix.gguf", [] if args.head is None else ["--head", args.head]
    for method in ["imatrix", *(own for own in args.methods.split(",") if own != "imatrix")]:
        out = args.work / f"w4a8-{method}"
        if not out.exists():
            extra = ["--imatrix-out", str(matrix)] if method == "imatrix" else []
            words = ["--scheme", "w4a8", "--method", method, *head, *extra]
            penstock_command("quantize", str(floats), str(out), *words, *data)
    rival = write_once(args.work / "q4_k_s.gguf", lambda out: quantize_rival(args, floats, matrix, out))
    print("| model | bytes of weights | bits | KL | same likeliest token | perplexity |\n|---|---|---|---|---|---|")
    report = judge(rival, floats, args)
    line("llama.cpp Q4_K_S, imatrix", report)
    limit = report["model"]["weight_bytes"]
    line("w4a8, rtn", judge(floats, floats, args, "w4a8"))
    for method in args.methods.split(","):
        line(f"w4a8, {method}", judge(args.work / f"w4a8-{method}", floats, args))
    for method in filter(None, args.budget_methods.split(",")):
        out = args.work / f"mix-{method}"
        if not out.exists():
            size = ["--budget", f"{limit / 1e6:.6f}MB"]
            penstock_command("quantize", str(floats), str(out), "--scheme", "w4a8", "--method", method, *data, *size)
        line(f"mix of the bytes of Q4_K_S, {method}", judge(out, floats, args))
    if args.logit_windows:
        check_logits(floats, rival, args)


if __name__ == "__main__":
    main()
