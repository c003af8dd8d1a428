"""Export: deterministic, complete, and refusing by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.core import native
from penstock.core.tokenizer import NativeTokenizer
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.graph import export
from penstock.graph.bundle import BundleWriter, read_graph
from penstock.graph.export import export_bundle
from penstock.graph.tokenizer.compiler import compile_tokenizer
from tests.support.bundle_weights import weights_of
from tests.support.errors import raises
from tests.support.families import save
from tests.support.gguf_blocks import write_demo
from tests.support.gguf_files import llama_file
from tests.support.invariant_checkpoints import write_checkpoint
from tests.support.marks import mostly_long

DEMO = Path(__file__).parents[2] / "demo"
SCHEMES = ("f32", "f16", "bf16", "w8a16", "w8a8", "w4a16", "w4a8")


def edit(folder: Path, **tensors: np.ndarray | None) -> Path:
    """Replace, add (arrays) or remove (None) tensors; names are written with __ for dots."""
    stored = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        name = name.replace("__", ".")
        if value is None:
            del stored[name]
        else:
            stored[name] = value
    save_file(stored, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("scheme", mostly_long([*SCHEMES, "gguf"], "w4a8", "bf16", "gguf"))
def test_weights_in_pieces_are_the_same(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of many pieces, with memory for little more than one, and joined weights that begin inside a tile."""
    if scheme == "gguf":
        source, scheme_or_none = tmp_path / "model.gguf", None
        write_demo(source, lambda name: "q8_0" if "ffn_down" in name else "q6_k" if "v" in name else "q4_k")
    else:
        source, scheme_or_none = write_checkpoint(tmp_path / "model"), scheme
    export_bundle(source, tmp_path / "whole.psm", scheme=scheme_or_none)
    monkeypatch.setattr(export, "_PIECE_BYTES", 1024)
    monkeypatch.setattr(export, "_MAX_WAITING_BYTES", 0)
    export_bundle(source, tmp_path / "pieces.psm", scheme=scheme_or_none)
    assert (tmp_path / "pieces.psm").read_bytes() == (tmp_path / "whole.psm").read_bytes()


@pytest.mark.parametrize("layout", export._FLOAT_TILES)
def test_whole_float_tiles_fill_their_memory(layout: int) -> None:
    """An export does not zero memory for them, whatever their number of columns."""
    with native.Context() as context:
        for cols in (1, 2, 31, 33, 64):
            values = np.random.default_rng(cols).standard_normal((32, cols), np.float32)
            packed = [np.full(native.layout_bytes(int(layout), 32, cols), byte, np.uint8) for byte in (0, 0xA5)]
            for memory in packed:
                native.pack(context, int(layout), 32, cols, 0, 32, 1, values, memory)
            assert packed[0].tobytes() == packed[1].tobytes()


def test_packing_needs_less_memory_than_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Memory(export._PackingMemory):
        def __init__(self, num_bytes: int) -> None:
            sizes.append(num_bytes)
            super().__init__(num_bytes)

    monkeypatch.setattr(export, "_PackingMemory", Memory)
    monkeypatch.setattr(export, "_PIECE_BYTES", 1024)
    monkeypatch.setattr(export, "_MAX_WAITING_BYTES", 0)
    export_bundle(write_checkpoint(tmp_path / "model"), tmp_path / "out.psm", scheme="bf16")
    weights = read_graph(tmp_path / "out.psm")[0].weights.values()
    assert sizes[0] < max(weight.num_bytes for weight in weights)


def test_an_error_of_the_disk_is_the_one_that_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that wait behind the failed one fail, too, and their errors only follow from it."""
    real, calls = BundleWriter.add_weight, iter(range(1 << 20))

    def fill(writer: BundleWriter, *args: Any, **more: Any) -> None:
        if next(calls) == 2:
            raise FileAccessError("bundle: No space left on device")
        real(writer, *args, **more)

    monkeypatch.setattr(export, "_PIECE_BYTES", 1024)
    monkeypatch.setattr(BundleWriter, "add_weight", fill)
    with pytest.raises(FileAccessError):
        export_bundle(write_checkpoint(tmp_path / "model"), tmp_path / "out.psm")
    assert not (tmp_path / "out.psm").exists()


@pytest.mark.parametrize("scheme", mostly_long(SCHEMES, "w4a8"))
def test_the_same_input_makes_the_same_bytes(tmp_path: Path, scheme: str) -> None:
    folder = write_checkpoint(tmp_path / "model")
    for out in ("one.psm", "two.psm"):
        report = export_bundle(folder, tmp_path / out, scheme=scheme)
    assert (tmp_path / "one.psm").read_bytes() == (tmp_path / "two.psm").read_bytes()
    assert report.scheme == scheme
    assert report.file_bytes == (tmp_path / "two.psm").stat().st_size
    with native.Model.open(tmp_path / "one.psm", verify=True) as model:
        assert model.info.vocab_size == 259
        assert bytes(model.segment("config.json") or b"") == (folder / "config.json").read_bytes()


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8", "w4a16", "w4a8"])
@pytest.mark.parametrize("tied", mostly_long([False, True], True))
def test_a_quantized_folder_exports_to_the_same_weights(tmp_path: Path, scheme: str, tied: bool) -> None:
    folder = write_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    quantize_checkpoint(folder, tmp_path / "quantized", scheme)
    export_bundle(folder, tmp_path / "one.psm", scheme=scheme)
    report = export_bundle(tmp_path / "quantized", tmp_path / "two.psm")
    assert report.scheme == scheme
    assert weights_of(tmp_path / "one.psm") == weights_of(tmp_path / "two.psm")


def test_a_quantized_folder_has_one_scheme(tmp_path: Path) -> None:
    quantize_checkpoint(write_checkpoint(tmp_path / "model"), tmp_path / "quantized", "w8a8")
    with raises(UnsupportedError, param="scheme", match=r"w8a8, .*got w4a8"):
        export_bundle(tmp_path / "quantized", tmp_path / "out.psm", scheme="w4a8")


def test_missing_and_left_over_tensors_are_named(tmp_path: Path) -> None:
    folder = edit(write_checkpoint(tmp_path / "missing"), model__norm__weight=None)
    with raises(InvalidFileError, param="model.norm.weight", match=r"lacks .*'model\.norm\.weight', .* llama"):
        export_bundle(folder, tmp_path / "out.psm")
    folder = edit(write_checkpoint(tmp_path / "extra"), model__extra__weight=np.ones((2, 2), np.float32))
    with raises(InvalidFileError, param="model.extra.weight", match=r": has .*'model\.extra\.weight', .* llama"):
        export_bundle(folder, tmp_path / "out.psm")
    assert not (tmp_path / "out.psm").exists()


def test_layers_without_tensors_are_named_before_the_capture(tmp_path: Path) -> None:
    """It would take minutes for as many layers as a configuration may have."""
    folder = write_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 64}))
    first = f"model.layers.{config['num_hidden_layers']}."
    stages: list[str] = []
    with raises(
        InvalidFileError, param="model.layers.2.input_layernorm.weight", match=rf"lacks tensors '{re.escape(first)}"
    ):
        export_bundle(folder, tmp_path / "out.psm", progress=lambda stage, _done, _total: stages.append(stage))
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))
    with raises(InvalidFileError, param="model.layers.0.mlp.gate_proj.weight", match="shape"):
        export_bundle(folder, tmp_path / "out.psm", progress=lambda stage, _done, _total: stages.append(stage))
    (tmp_path / "model.gguf").write_bytes(llama_file({"llama.block_count": 64}))
    with raises(InvalidFileError, param="model.layers.2.input_layernorm.weight", match=r"lacks tensors '"):
        export_bundle(tmp_path / "model.gguf", tmp_path / "out.psm", progress=lambda *own: stages.append(own[0]))
    assert stages == []


def test_an_error_does_not_wait_for_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large vocabulary takes seconds, in a thread beside the capture."""
    go, ended = Event(), Event()

    def compile_late(files: dict[str, bytes]) -> tuple[bytes, str]:
        assert go.wait(600)
        try:
            return compile_tokenizer(files)
        finally:
            ended.set()

    monkeypatch.setattr(export, "compile_tokenizer", compile_late)
    (tmp_path / "model.gguf").write_bytes(llama_file({"llama.block_count": 64}))
    with pytest.raises(InvalidFileError):
        export_bundle(tmp_path / "model.gguf", tmp_path / "out.psm")
    assert not ended.is_set()
    go.set()
    assert ended.wait(600)


@pytest.mark.long
def test_rotary_buffers_and_an_equal_tied_head_are_ignored(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    export_bundle(folder, tmp_path / "plain.psm")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    edit(folder, lm_head__weight=embedding, **inv_freq)
    export_bundle(folder, tmp_path / "more.psm")
    assert weights_of(tmp_path / "more.psm") == weights_of(tmp_path / "plain.psm")
    edit(folder, lm_head__weight=embedding + 1)
    export_bundle(folder, tmp_path / "own_head.psm")
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False})
    )
    export_bundle(folder, tmp_path / "untied.psm")
    assert weights_of(tmp_path / "own_head.psm") == weights_of(tmp_path / "untied.psm")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model__norm__weight", np.ones(95, np.float32), "[96], got [95]"),
        ("lm_head__weight", np.ones((259, 95), np.float32), "[259, 96], got [259, 95]"),
        ("lm_head__weight", np.ones((259, 96), np.int64), "F32, F16 or BF16, got I64"),
        ("lm_head__weight", np.full((259, 96), np.nan, np.float32), "tensor 'lm_head.weight': "),
    ],
)
def test_tensors_of_wrong_shape_or_type_are_named(tmp_path: Path, name: str, value: np.ndarray, message: str) -> None:
    folder = edit(write_checkpoint(tmp_path / "model"), **{name: value})
    with pytest.raises(PenstockError, match=re.escape(message)):
        export_bundle(folder, tmp_path / "out.psm", scheme="w8a8")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("scheme", ["f32", "bf16", "w8a8"])
@pytest.mark.parametrize(
    ("name", "shape", "place", "value"),
    [
        ("model.norm.weight", (96,), (7,), np.nan),
        ("model.layers.0.input_layernorm.weight", (96,), (95,), -np.inf),
        ("model.embed_tokens.weight", (259, 96), (258, 1), np.inf),
        ("lm_head.weight", (259, 96), (17, 95), np.nan),
    ],
)
def test_values_that_are_not_finite_are_named(
    tmp_path: Path, scheme: str, name: str, shape: tuple[int, ...], place: tuple[int, ...], value: float
) -> None:
    bad = np.ones(shape, np.float32)
    bad[place] = value
    folder = edit(write_checkpoint(tmp_path / "model"), **{name: bad})
    what = {"nan": "NaN", "inf": "infinity", "-inf": "-infinity"}[str(value)]
    fact = rf"'{name}': .*got {what} at {re.escape(str(list(place)))}"
    with pytest.raises(InvalidFileError, match=fact):
        export_bundle(folder, tmp_path / "out.psm", scheme=scheme)


@pytest.mark.parametrize(
    ("key", "value"),
    [("model_type", "gpt_unknown"), ("hidden_act", "relu"), ("num_key_value_heads", 4), ("hidden_size", "x")],
)
def test_configs_that_no_network_reads_are_refused_by_key(tmp_path: Path, key: str, value: object) -> None:
    folder = write_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    with raises(PenstockError, param=key):
        export_bundle(folder, tmp_path / "out.psm")


def test_bad_options_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    export_bundle(folder, tmp_path / "out.psm")
    with raises(InvalidArgumentError, param="source"):
        export_bundle(tmp_path / "out.psm", tmp_path / "again.psm")
    with raises(InvalidArgumentError, param="scheme"):
        export_bundle(folder, tmp_path / "again.psm", scheme="w5")
    with pytest.raises(FileAccessError):
        export_bundle(folder, tmp_path / "gone" / "again.psm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.psm"]


def test_the_default_scheme_is_the_checkpoints_type(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    tensors = {name: array.astype(np.float16) for name, array in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    assert export_bundle(folder, tmp_path / "out.psm").scheme == "f16"


def test_an_unsupported_tokenizer_is_named_in_the_export(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    values = json.loads((DEMO / "model" / "tokenizer.json").read_text())
    for normalizer, reason in ((None, ""), ({"type": "ByteLevel"}, "tokenizer.json: normalizer ByteLevel")):
        (folder / "tokenizer.json").write_text(json.dumps(values | {"normalizer": normalizer}))
        assert export_bundle(folder, tmp_path / "out.psm").tokenizer_note == reason
        with native.Model.open(tmp_path / "out.psm", verify=True) as model:
            assert model.segment("tokenizer.json") is not None  # with Python it runs either way
            assert NativeTokenizer(model).info.unsupported == reason


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    folder, seen = write_checkpoint(tmp_path / "model"), []
    report = export_bundle(folder, tmp_path / "out.psm", progress=lambda *state: seen.append(state))
    stored = sum(array.nbytes for array in load_file(folder / "model.safetensors").values())
    assert seen[0] == ("capture", 0, 0)
    assert seen[-1] == ("pack", stored, stored)
    assert report.source_bytes == stored


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("generation_config.json", '{"eos_token_id": "hot"}', "eos_token_id"),
        ("tokenizer_config.json", '{"bos_token": 3}', "bos_token"),
        ("config.json", None, "hidden_size"),
    ],
)
def test_mistakes_in_small_files_come_before_the_capture(
    name: str, text: str | None, message: str, tmp_path: Path
) -> None:
    folder = save("llama_tied_one_kv_head", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"hidden_size": "wide"}
    (folder / name).write_text(json.dumps(config) if text is None else text)
    stages: list[str] = []
    with pytest.raises(InvalidFileError, match=message):
        export_bundle(folder, tmp_path / "out.psm", progress=lambda stage, _done, _total: stages.append(stage))
    assert stages == []


def test_a_mistake_in_a_tokenizer_leaves_no_file(tmp_path: Path) -> None:
    """It is found beside the packing, as a vocabulary takes long to compile."""
    folder = save("llama_tied_one_kv_head", tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with raises(InvalidFileError, match=r"^tokenizer\.json"):
        export_bundle(folder, tmp_path / "out.psm")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
