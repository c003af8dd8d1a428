"""``penstock convert FOLDER OUT.gguf``: files that the gguf package and Penstock read as what was written."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from penstock import LLM
from penstock.checkpoint.convert import Conversion
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.writer import quantize_q8_0
from penstock.checkpoint.tokenizer_file import LibraryTokenizer
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.runtime.convert import convert
from tests.support.errors import raises
from tests.support.families import prompt, save
from tests.support.gguf_blocks import DEMO_FOLDER

NAMES = ("llama", "gemma2", "mistral", "qwen2", "qwen3", "olmo2", "granite", "gemma", "gemma3_text")
Kind = gguf.GGMLQuantizationType


@pytest.mark.parametrize("name", [*NAMES[:2], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[2:])])
def test_a_float_file_has_the_logits_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = save(name, tmp_path / "folder")
    if name.startswith("gemma"):  # what a file has no key for is as in the published models
        config = json.loads((folder / "config.json").read_text())
        removed = ("layer_types", "sliding_window_pattern", "attn_logit_softcapping" if "3" in name else "")
        config = {key: value for key, value in config.items() if key not in removed}
        (folder / "config.json").write_text(json.dumps(config | {"query_pre_attn_scalar": config["head_dim"]}))
    report = convert(folder, tmp_path / "out.gguf", Conversion("f32"))
    logits = []
    for path in (folder, tmp_path / "out.gguf"):
        with LLM(path, scheme="f32", mode="eager") as llm:
            logits.append(llm.logits(prompt(20)))
    assert np.array_equal(logits[0], logits[1])
    assert (report.num_files, report.num_bytes) == (1, (tmp_path / "out.gguf").stat().st_size)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "out.gguf"]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
def test_tensors_are_those_that_gguf_makes(tmp_path: Path, dtype: str) -> None:
    convert(DEMO_FOLDER, tmp_path / "out.gguf", Conversion(dtype))
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 100)
    source = load_file(DEMO_FOLDER / "model.safetensors")
    for key, values in source.items():
        tensor = tensors[names.get_name(key, (".weight",))]
        kind = Kind[dtype.upper()] if values.ndim == 2 else Kind.F32
        assert tensor.tensor_type == kind
        if not key.endswith(("q_proj.weight", "k_proj.weight")):
            expected = gguf.quantize(values.float().numpy(), kind)
            assert np.array_equal(tensor.data.view(np.uint8).reshape(-1), expected.view(np.uint8).reshape(-1))
    assert len(tensors) == len(source)
    assert reader.fields["general.file_type"].contents() == {"f16": 1, "bf16": 32, "q8_0": 7}[dtype]


def test_blocks_of_q8_0_are_those_of_the_reference() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(0, 1, (50, 64)).astype(np.float32) * rng.choice([0, 1e-9, 1, 1e4], (50, 64)).astype(np.float32)
    rows[0] = 0
    rows[1, :32] = np.arange(-15.5, 16.5)  # ties
    assert np.array_equal(quantize_q8_0(rows), gguf.quantize(rows, Kind.Q8_0))


def test_the_tokenizer_of_the_folder_is_kept(tmp_path: Path) -> None:
    convert(DEMO_FOLDER, tmp_path / "out.gguf", Conversion())
    files = Checkpoint.open(tmp_path / "out.gguf").side_files()
    text = (DEMO_FOLDER / "valid.txt").read_text()[:3000] + "<|end|> 1234 x"
    ids = [LibraryTokenizer(data).encode(text) for data in
           (files["tokenizer.json"], (DEMO_FOLDER / "tokenizer.json").read_bytes())]  # fmt: skip
    assert ids[0] == ids[1]
    own = json.loads((DEMO_FOLDER / "generation_config.json").read_text())["eos_token_id"]
    eos = json.loads(files["generation_config.json"])["eos_token_id"]
    assert own in (eos, eos[0])


@pytest.mark.parametrize(
    ("conversion", "out", "param"),
    [
        (Conversion(layout="split"), "out.gguf", "layout"),
        (Conversion(max_file_mb=1), "out.gguf", "max_file_mb"),
        (Conversion("q8_0"), "out", "dtype"),
    ],
)
def test_options_of_other_forms_are_refused(tmp_path: Path, conversion: Conversion, out: str, param: str) -> None:
    with raises(InvalidArgumentError, param=param):
        convert(DEMO_FOLDER, tmp_path / out, conversion)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"model_type": "phi"}, "model_type"),
        ({"sliding_window": 8, "model_type": "mistral"}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64,
                           "beta_fast": 16.0}}, "rope_parameters"),
    ],
)  # fmt: skip
def test_what_a_file_cannot_say_is_refused(tmp_path: Path, changed: dict[str, object], param: str) -> None:
    folder = save("llama", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(config | changed))
    with raises(UnsupportedError, param=param):
        convert(folder, tmp_path / "out.gguf", Conversion())
    assert not (tmp_path / "out.gguf").exists()
