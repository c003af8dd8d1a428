"""Makes the same random models in the format of every system, and keeps them.

    python benchmarks/peers/convert.py build/peers --shape 348m [--system "openvino int4" ...]

A file is written under another name first, so that a file with the final name is complete.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

from install import call, python_of
from systems import PENSTOCK, SHAPES, SYSTEMS, System, find_system

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OPENVINO_EXTRA = {"int4": ["--group-size", "128", "--ratio", "1.0", "--sym"]}


def checkpoint_of(folder: Path, shape: str) -> Path:
    """Return the checkpoint of a shape; make it if it is missing."""
    checkpoint = folder / "models" / f"llama-{shape}"
    if not checkpoint.exists():
        partial = folder / "models" / f"partial-{shape}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        script = ROOT / "benchmarks" / "make_checkpoint.py"
        call([sys.executable, script, partial, "--shape", shape], folder / "convert.log")
        partial.rename(checkpoint)
    return checkpoint


def scripts_fingerprint(scripts: Iterable[str]) -> str:
    """Return a fingerprint of the measuring scripts, because figures of different scripts are not mixed."""
    value = 0
    for name in sorted({*scripts, "processes.py", "protocol.py", "systems.py"}):
        value = zlib.crc32((HERE / name).read_bytes(), value)
    return f"{value:08x}"


def penstock_fingerprint() -> str:
    """Return a fingerprint of the library and the sources, because figures of different builds are not mixed."""
    import penstock
    from penstock.core.native import library_file

    value = zlib.crc32(Path(library_file()).read_bytes())
    package = Path(penstock.__file__).parent
    for path in sorted(package.rglob("*.py")):
        value = zlib.crc32(path.read_bytes(), value)
    return f"{value:08x}"


def format_path(folder: Path, shape: str, system: System) -> Path:
    """Return the path of a system's model.  That of Penstock contains the build, because the format may change."""
    place = folder / "formats" / shape
    if system.peer == PENSTOCK:
        return place / f"penstock-{system.mode}-{penstock_fingerprint()}.psm"
    if system.peer == "llama.cpp":
        return place / f"{system.mode}.gguf"
    if (system.peer, system.mode) in (("vllm", "bf16"), ("transformers", "bf16")):
        return checkpoint_of(folder, shape)
    return place / f"{system.peer}-{system.mode}"


def _commands(folder: Path, shape: str, system: System, out: Path) -> list[list[str | Path]]:
    checkpoint, mode = checkpoint_of(folder, shape), system.mode
    if system.peer == PENSTOCK:
        return [[sys.executable, "-m", "penstock", "export", checkpoint, out, "--scheme", mode]]
    if system.peer == "llama.cpp":
        if mode == "bf16":
            return [[python_of(folder, "transformers"), HERE / "convert_gguf.py", checkpoint, out]]
        source = convert(folder, shape, find_system("llama.cpp bf16"))
        return [[folder / "llama.cpp" / "build" / "bin" / "llama-quantize", source, out, mode]]
    if system.peer == "openvino":
        exporter = python_of(folder, "openvino-export").with_name("optimum-cli")
        options = ["--task", "text-generation-with-past", "--weight-format", mode, *OPENVINO_EXTRA.get(mode, [])]
        return [[exporter, "export", "openvino", "--model", checkpoint, *options, out]]
    if system.peer == "onnxruntime":
        builder = [python_of(folder, "onnxruntime-export"), "-m", "onnxruntime_genai.models.builder"]
        options = ["-p", mode, "-e", "cpu", "-c", folder / "onnxruntime-cache"]
        return [[*builder, "-m", checkpoint, "-o", out, *options, "--extra_options", "int4_accuracy_level=4"]]
    if system.peer == "vllm":
        return [[python_of(folder, "transformers"), HERE / "convert_vllm.py", checkpoint, out, mode]]
    if system.peer == "ctranslate2":
        converter = python_of(folder, "transformers").with_name("ct2-transformers-converter")
        return [[converter, "--model", checkpoint, "--output_dir", out, "--quantization", mode]]
    raise SystemExit(f"{system.name}: there is no converter")


def convert(folder: Path, shape: str, system: System) -> Path:
    """Return the model in the system's format; make it if it is missing."""
    path = format_path(folder, shape, system)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial-{path.name}")
    remove(partial)
    start = time.monotonic()
    for command in _commands(folder, shape, system, partial):
        # The safe path: the installed package is exported with, not the sources that we may stand in.
        call(command, folder / "convert.log", HF_HUB_OFFLINE="1", PYTHONSAFEPATH="1")
    if system.peer == PENSTOCK:
        for old in path.parent.glob(f"penstock-{system.mode}-*.psm"):
            old.unlink()
    partial.rename(path)
    print(f"{system.name}, {shape}: converted in {time.monotonic() - start:.0f} s", flush=True)
    return path


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def bits_per_weight(path: Path, config: dict[str, int], embedding_bits: float) -> float:
    """Return the bits read per weight of a token, with the head and the scales, without the embedding.

    The result comes from file sizes, of which names, tokenizers and graphs are up to about 1 %.
    """
    suffixes = {".safetensors", ".bin", ".data", ".gguf"}
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in suffixes]
    embedding = config["vocab_size"] * config["hidden_size"]
    if "openvino" in path.name:
        files = [path / "openvino_model.bin"]
    stored = sum(file.stat().st_size for file in files) * 8 - embedding * embedding_bits
    return stored / num_weights_read(config)


def num_layer_weights(config: dict[str, int]) -> int:
    """Return the number of weights in linear layers without the head, which every token of a prompt uses."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return config["num_hidden_layers"] * hidden * (2 * hidden + 2 * kv + 3 * inner)


def num_weights_read(config: dict[str, int]) -> int:
    """Return the number of weights in linear layers and the head, which every new token reads."""
    return num_layer_weights(config) + config["vocab_size"] * config["hidden_size"]


def config_of(folder: Path, shape: str) -> dict[str, int]:
    config: dict[str, int] = json.loads((checkpoint_of(folder, shape) / "config.json").read_text())
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--system", action="append")
    args = parser.parse_args()
    folder = args.folder.resolve()
    for shape in args.shape or SHAPES:
        for system in [find_system(name) for name in args.system] if args.system else SYSTEMS:
            path = convert(folder, shape, system)
            if system.peer != PENSTOCK:
                bits = bits_per_weight(path, config_of(folder, shape), system.embedding_bits)
                print(f"{system.name}, {shape}: {bits:.2f} bits per weight")


if __name__ == "__main__":
    main()
