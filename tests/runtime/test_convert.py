"""``penstock convert``: what is not asked for stays, bit for bit; the rest equals what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock import LLM
from penstock.checkpoint.convert import Conversion
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.export import export_bundle
from penstock.runtime.convert import convert
from penstock.sharding.write import shard_folder
from tests.support.errors import raises
from tests.support.families import build, prompt, save
from tests.support.gguf_files import llama_file
from tests.support.gguf_models import FAMILIES, eps_of, gguf_arrays, random_model, write_gguf
from tests.support.sharded_folders import DEMO, strategy_of

AS_IS = Conversion()
TENSORS = "model.safetensors"


def same_tensors(first: Path, second: Path) -> None:
    one, two = load_all(first), load_all(second)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (two[name].dtype, two[name].shape), name
        assert torch.equal(tensor.view(torch.uint8), two[name].view(torch.uint8)), name


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    with torch.no_grad():
        return model(torch.tensor([prompt(20)])).logits


@pytest.mark.parametrize("out", ["out", "out.psm", "out.gguf"])
def test_a_gguf_file_is_refused_with_the_command_to_use(tmp_path: Path, out: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(llama_file())
    with raises(UnsupportedError, param="source", match=r"`penstock export .*model\.gguf OUT\.psm` makes"):
        convert(path, tmp_path / out, AS_IS)
    assert not (tmp_path / out).exists()


def test_a_folder_is_written_again_as_it_is(tmp_path: Path) -> None:
    report = convert(DEMO, tmp_path / "out", AS_IS)
    same_tensors(DEMO, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (DEMO / "config.json").read_bytes()
    assert (report.num_files, report.num_changed) == (1, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_several_files_have_an_index(tmp_path: Path) -> None:
    report = convert(DEMO, tmp_path / "files", Conversion(max_file_mb=3))
    files = sorted(path.name for path in (tmp_path / "files").glob("*.safetensors"))
    assert report.num_files == len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert all((tmp_path / "files" / name).stat().st_size < 3.1e6 for name in files)
    convert(tmp_path / "files", tmp_path / "one", AS_IS)
    same_tensors(DEMO, tmp_path / "one")
    assert torch.equal(logits(tmp_path / "files"), logits(DEMO))


def test_types_round_as_pytorch_does(tmp_path: Path) -> None:
    source = save("qwen2", tmp_path / "source")
    names = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
    for dtype, own in names.items():
        convert(source, tmp_path / dtype, Conversion(dtype=dtype))
        expected = {name: value.to(own) for name, value in load_all(source).items()}
        found = load_all(tmp_path / dtype)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert config_of(tmp_path / dtype)["dtype"] == str(own).removeprefix("torch.")
    for dtype in ("f16", "bf16"):
        convert(tmp_path / dtype, tmp_path / f"{dtype}-f32", Conversion(dtype="f32"))
        convert(tmp_path / f"{dtype}-f32", tmp_path / f"{dtype}-again", Conversion(dtype=dtype))
        same_tensors(tmp_path / dtype, tmp_path / f"{dtype}-again")


def test_values_that_do_not_fit_name_their_tensor(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save_file({"a.weight": torch.tensor([[1e30, 1.0]])}, tmp_path / "source" / TENSORS)
    (tmp_path / "source" / "config.json").write_text('{"model_type": "llama"}')
    with raises(InvalidFileError, param="a.weight", match=r"'a.weight': dtype: .*f16, got 1e\+30"):
        convert(tmp_path / "source", tmp_path / "out", Conversion(dtype="f16"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "w4a16"])
def test_a_bundle_gives_its_folder_back(scheme: str, tmp_path: Path) -> None:
    source = DEMO
    if scheme != "bf16":
        source = tmp_path / "quantized"
        quantize_checkpoint(DEMO, source, scheme)
    export_bundle(source, tmp_path / "model.psm")
    convert(tmp_path / "model.psm", tmp_path / "out", AS_IS)
    assert (tmp_path / "out" / TENSORS).read_bytes() == (source / TENSORS).read_bytes() or scheme == "bf16"
    same_tensors(source, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_bundle_that_quantized_gives_a_quantized_folder(tmp_path: Path) -> None:
    export_bundle(DEMO, tmp_path / "model.psm", scheme="w4a8")
    convert(tmp_path / "model.psm", tmp_path / "out", AS_IS)
    quantize_checkpoint(DEMO, tmp_path / "quantized", "w4a8")
    same_tensors(tmp_path / "quantized", tmp_path / "out")
    assert config_of(tmp_path / "out") == config_of(tmp_path / "quantized")


def test_an_order_that_no_other_program_has_stays_inside(tmp_path: Path) -> None:
    """Value heads of a GGUF file of Qwen3.5 keep its order, which an adapter and other programs do not know."""
    family, path = FAMILIES["qwen35"], tmp_path / "model.gguf"
    model = random_model(family)
    write_gguf(path, family.arch, gguf_arrays(family, model), {**eps_of(model), **family.keys})
    export_bundle(path, tmp_path / "model.psm", scheme="f32")
    convert(tmp_path / "model.psm", tmp_path / "again", AS_IS)
    export_bundle(tmp_path / "again", tmp_path / "again.psm", scheme="f32")
    with LLM(tmp_path / "model.psm") as first, LLM(tmp_path / "again.psm") as second:
        assert np.array_equal(first.logits([3, 5, 7]), second.logits([3, 5, 7]))
    for out, conversion in (
        ("out.gguf", AS_IS),
        ("out", Conversion(layout="fused")),
        ("out", Conversion(lora=tmp_path)),
    ):
        with raises(UnsupportedError, param="source"):
            convert(tmp_path / "model.psm", tmp_path / out, conversion)


@pytest.mark.parametrize("family", ["llama_biases", "qwen3_tied_head_dim", "qwen2"])
def test_bundles_of_families_give_their_tensors_back(family: str, tmp_path: Path) -> None:
    source = save(family, tmp_path / "source")
    export_bundle(source, tmp_path / "model.psm")
    convert(tmp_path / "model.psm", tmp_path / "out", AS_IS)
    same_tensors(source, tmp_path / "out")


@pytest.mark.long
def test_a_folder_becomes_a_bundle(tmp_path: Path) -> None:
    convert(DEMO, tmp_path / "out.psm", AS_IS)
    export_bundle(DEMO, tmp_path / "expected.psm")
    assert (tmp_path / "out.psm").read_bytes() == (tmp_path / "expected.psm").read_bytes()


@pytest.mark.long
def test_a_sharded_folder_becomes_whole(tmp_path: Path) -> None:
    shard_folder(DEMO, tmp_path / "cut", strategy_of(DEMO, 3))
    convert(tmp_path / "cut", tmp_path / "out", AS_IS)
    same_tensors(DEMO, tmp_path / "out")


def phi3(folder: Path) -> Path:
    """A network with fused linears, made by transformers."""
    torch.manual_seed(1)
    config = transformers.Phi3Config(
        vocab_size=1003, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def test_fused_linears_become_split_ones_and_back(tmp_path: Path) -> None:
    source = phi3(tmp_path / "source")
    convert(source, tmp_path / "split", Conversion(layout="split"))
    assert config_of(tmp_path / "split")["model_type"] == "llama"
    assert "model.layers.1.self_attn.k_proj.weight" in load_all(tmp_path / "split")
    assert torch.equal(logits(tmp_path / "split"), logits(source)), "transformers runs it as a llama"
    convert(tmp_path / "split", tmp_path / "fused", Conversion(layout="fused"))
    same_tensors(source, tmp_path / "fused")
    assert torch.equal(logits(tmp_path / "fused"), logits(source))


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt_neox", "bloom", "falcon_new"])
def test_heads_that_lie_together_become_split_and_back(family: str, tmp_path: Path) -> None:
    """The rows of q, k and v of each head, or group of heads, of one tensor; the network's own names, and back."""
    source = save(family, tmp_path / "source")
    convert(source, tmp_path / "split", Conversion(layout="split"))
    tensors = load_all(tmp_path / "split")
    assert {"layers.1.self_attn.k_proj.weight", "layers.0.self_attn.q_proj.weight"} < tensors.keys()
    assert not any("query_key_value" in name for name in tensors)
    export_bundle(source, tmp_path / "source.psm")
    export_bundle(tmp_path / "split", tmp_path / "split.psm")
    assert weights_of(tmp_path / "split.psm") == weights_of(tmp_path / "source.psm")
    convert(tmp_path / "split", tmp_path / "fused", Conversion(layout="fused"))
    same_tensors(source, tmp_path / "fused")
    assert config_of(tmp_path / "fused") == config_of(source)
    convert(tmp_path / "source.psm", tmp_path / "again", Conversion(layout="fused"))
    same_tensors(source, tmp_path / "again")


def weights_of(path: Path) -> bytes:
    segment = next(segment for segment in read_graph(path)[1] if segment.name == "weights")
    return path.read_bytes()[segment.offset : segment.offset + segment.num_bytes]


def test_a_form_that_is_no_rows_is_refused(tmp_path: Path) -> None:
    source = save("gpt2", tmp_path / "source")
    with raises(UnsupportedError, param="layout", match="expected rows of"):
        convert(source, tmp_path / "out", Conversion(layout="split"))


def test_split_linears_become_fused_ones_and_back(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "source")
    convert(source, tmp_path / "fused", Conversion(layout="fused", max_file_mb=1))
    convert(tmp_path / "fused", tmp_path / "split", Conversion(layout="split"))
    same_tensors(source, tmp_path / "split")
    assert torch.allclose(logits(tmp_path / "fused"), logits(source), atol=1e-5)


def test_a_layout_that_no_model_has_is_refused(tmp_path: Path) -> None:
    refused = {
        "qwen2": "layout",
        "llama_biases": "attention_bias",
        "llama_head_dim": "head_dim",
        "llama_rope_llama3": "rope_type",
    }
    for family, param in refused.items():
        source = save(family, tmp_path / family)
        with raises(UnsupportedError, param=param):
            convert(source, tmp_path / "out", Conversion(layout="fused"))
    with raises(UnsupportedError, param="layout", match="phi3"):
        convert(DEMO, tmp_path / "out", Conversion(layout="split"))


def adapter(folder: Path, shapes: dict[str, tuple[int, int]], **config: Any) -> dict[str, torch.Tensor]:
    """Write an adapter of rank 4 in peft's layout; return its tensors."""
    folder.mkdir()
    tensors, rng = {}, np.random.default_rng(3)
    for module, (rows, cols) in shapes.items():
        for kind, shape in (("lora_A", (4, cols)), ("lora_B", (rows, 4))):
            values = torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * 0.1)
            tensors[f"base_model.model.{module}.{kind}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_dora": False, "fan_in_fan_out": False, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    return tensors


Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {Q: (160, 160), DOWN: (160, 200)}


@pytest.mark.parametrize(
    ("config", "scales"),
    [({}, (2.0, 2.0)), ({"use_rslora": True}, (4.0, 4.0)), ({"alpha_pattern": {"mlp.down_proj": 2}}, (2.0, 0.5))],
)
def test_an_adapter_is_added(config: dict[str, Any], scales: tuple[float, float], tmp_path: Path) -> None:
    source = save("llama", tmp_path / "source")
    tensors = adapter(tmp_path / "lora", SHAPES, **config)
    report = convert(source, tmp_path / "out", Conversion(lora=tmp_path / "lora"))
    assert report.num_changed == 2
    expected = load_all(source)
    for module, scale in zip(SHAPES, scales, strict=True):
        a, b = (tensors[f"base_model.model.{module}.{kind}.weight"] for kind in ("lora_A", "lora_B"))
        expected[f"{module}.weight"] += scale * (b @ a)
    found = load_all(tmp_path / "out")
    for name, value in expected.items():
        changed = name.removesuffix(".weight") in SHAPES
        assert torch.allclose(found[name], value, atol=1e-6) if changed else torch.equal(found[name], value), name


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads what transformers deprecates
def test_an_adapter_is_added_as_peft_adds_it(tmp_path: Path) -> None:
    import peft

    source = save("llama", tmp_path / "source")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(2)
    network = transformers.AutoModelForCausalLM.from_pretrained(source)
    tuned = peft.get_peft_model(network, config)
    tuned.save_pretrained(tmp_path / "lora")
    convert(source, tmp_path / "out", Conversion(lora=tmp_path / "lora"))
    expected = tuned.merge_and_unload().state_dict()
    found = load_all(tmp_path / "out")
    assert all(torch.allclose(value, expected[name], atol=1e-6) for name, value in found.items())


def test_changes_together_are_changes_in_turn(tmp_path: Path) -> None:
    """An adapter of fused linears, which are then split; and quantized rows, which are split as they are."""
    source, lora = phi3(tmp_path / "source"), tmp_path / "lora"
    adapter(lora, {"model.layers.0.self_attn.qkv_proj": (128, 64), "model.layers.1.mlp.gate_up_proj": (192, 64)})
    convert(source, tmp_path / "together", Conversion("bf16", "split", lora))
    convert(source, tmp_path / "added", Conversion(lora=lora))
    convert(tmp_path / "added", tmp_path / "narrow", Conversion("bf16"))
    convert(tmp_path / "narrow", tmp_path / "split", Conversion(layout="split"))
    same_tensors(tmp_path / "together", tmp_path / "split")
    assert config_of(tmp_path / "together") == config_of(tmp_path / "split")
    for scheme in ("w8a8", "w4a8"):
        quantize_checkpoint(source, tmp_path / scheme, scheme)
        convert(tmp_path / scheme, tmp_path / f"{scheme}-split", Conversion(layout="split"))
        convert(source, tmp_path / f"split-{scheme}", Conversion(layout="split"))
        quantize_checkpoint(tmp_path / f"split-{scheme}", tmp_path / f"{scheme}-after", scheme)
        same_tensors(tmp_path / f"{scheme}-split", tmp_path / f"{scheme}-after")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "adapter_config.json: use_dora: expected false, got true"),
        ({"peft_type": "IA3"}, "adapter_config.json: peft_type: expected LORA"),
        ({"r": 8}, "adapter_config.json: r: expected 4, the rank of"),
        ({"lora_alpha": "8"}, "adapter_config.json: lora_alpha: expected a number"),
        ({"alpha_pattern": {"(a+)+$": 2}}, "adapter_config.json: alpha_pattern: expected names of modules"),
    ],
)
def test_bad_adapters_name_the_field(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    adapter(tmp_path / "lora", SHAPES, **config)
    with pytest.raises(PenstockError) as raised:
        convert(DEMO, tmp_path / "out", Conversion(lora=tmp_path / "lora"))
    assert str(raised.value).startswith(message)


def test_adapters_of_another_model_name_the_tensor(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "source")
    adapter(tmp_path / "wide", {Q: (160, 161)})
    with raises(
        InvalidFileError, param="model.layers.0.self_attn.q_proj.weight", match=rf"'{Q}.weight': .*\[160, 161\]"
    ):
        convert(source, tmp_path / "out", Conversion(lora=tmp_path / "wide"))
    adapter(tmp_path / "other", {"model.other": (160, 160)})
    with raises(InvalidFileError, match=r"'model.other.weight': "):
        convert(source, tmp_path / "out", Conversion(lora=tmp_path / "other"))
    adapter(tmp_path / "table", {Q: (160, 160)})
    save_file(
        {"base_model.model.x.lora_embedding_A": torch.ones(2, 2)}, tmp_path / "table" / "adapter_model.safetensors"
    )
    with raises(
        UnsupportedError,
        param="base_model.model.x.lora_embedding_A",
        match=r"'base_model\.model\.x\.lora_embedding_A': .*lora_A and lora_B",
    ):
        convert(source, tmp_path / "out", Conversion(lora=tmp_path / "table"))
    quantize_checkpoint(source, tmp_path / "quantized", "w8a8")
    with raises(UnsupportedError, param="lora", match="w8a8"):
        convert(tmp_path / "quantized", tmp_path / "out", Conversion(lora=tmp_path / "wide"))


def test_wrong_options_are_named(tmp_path: Path) -> None:
    for name, value in (("dtype", "f64"), ("layout", "other"), ("max_file_mb", -1)):
        with raises(InvalidArgumentError, param=name) as raised:
            Conversion(**{name: value})
        assert raised.value.param == name
    with raises(PenstockError, param="source", match="nowhere"):
        convert(tmp_path / "nowhere", tmp_path / "out", AS_IS)


def test_pickled_weights_become_safetensors(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = build("llama_tied_one_kv_head")
    model.config.save_pretrained(source)
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    convert(source, tmp_path / "out", AS_IS)
    expected = model.state_dict()
    found = load_all(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    files = [tmp_path / "1.gguf", tmp_path / "2.gguf"]
    for folder, file in zip((source, tmp_path / "out"), files, strict=True):
        convert(folder, file, AS_IS)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert torch.equal(logits(tmp_path / "out"), model(torch.tensor([prompt(20)])).logits)
