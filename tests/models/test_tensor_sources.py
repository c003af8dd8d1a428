"""Parameters that come from tensors of other names and forms: read, quantized, saved, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.checkpoint.sources import MappedCheckpoint, Source, Sources, resolve_sources
from penstock.errors import InvalidFileError
from penstock.graph.export import export_bundle
from penstock.graph.unpack_bundle import unpack_bundle
from penstock.models.families import built_in_families, maps_tensors
from penstock.models.loader import load_network, save_network
from penstock.models.mapped import open_mapped
from penstock.models.registry import find_network
from penstock.models.sources import add_to_norms, fused_rows, renamed, transposed
from penstock.nn import Linear, Module, RMSNorm
from penstock.runtime.eager import EagerProgram
from penstock.runtime.program import ProgramLimits
from tests.models.steps import relative_error, run_whole
from tests.support.errors import raises
from tests.support.families import build, expected_logits, prompt, save

FUSED = torch.arange(12 * 4, dtype=torch.float32).reshape(12, 4)

LIMITS = ProgramLimits(max_tokens=128, max_requests=4, max_rows=128, num_pages=12, context_len=256)


def mapped_as(
    own: Checkpoint, shapes: dict[str, tuple[int, ...]], sources: Sources, prefix: str = "", **options: Any
) -> MappedCheckpoint:
    return MappedCheckpoint(own, shapes, resolve_sources(sources, shapes, own.tensors, prefix), **options)


def checkpoint(folder: Path, **tensors: torch.Tensor) -> Checkpoint:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "own", "tie_word_embeddings": true}')
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


def mapped(folder: Path, sources: Sources, shapes: dict[str, tuple[int, ...]], **options: Any) -> MappedCheckpoint:
    own = checkpoint(folder / "own", fused=FUSED, norm=torch.tensor([0.5, -1.0]).bfloat16())
    return mapped_as(own, {"norm": (2,)} | shapes, sources, **options)


def test_rows_of_a_fused_tensor(tmp_path: Path) -> None:
    sources = {"a": Source("fused", ((0, 5),)), "b": Source("fused", ((5, 12),))}
    own = mapped(tmp_path, sources, {"a": (5, 4), "b": (7, 4)})
    assert sorted(own.tensors) == ["a", "b", "norm"]
    assert (own.tensors["b"].shape, own.tensors["b"].num_bytes) == ((7, 4), 7 * 16)
    assert (own.read("a") == FUSED[:5].numpy()).all()
    assert (own.read("b") == FUSED[5:].numpy()).all()
    own.release("b", 16, 48)
    own.release("a")
    assert (own.read("b") == FUSED[5:].numpy()).all()


def test_rows_of_each_head(tmp_path: Path) -> None:
    ranges = {"q": ((0, 2), (6, 8)), "k": ((2, 4), (8, 10)), "v": ((4, 6), (10, 12))}
    own = mapped(tmp_path, {n: Source("fused", r) for n, r in ranges.items()}, dict.fromkeys(ranges, (4, 4)))
    heads = FUSED.reshape(2, 3, 2, 4)
    for i, name in enumerate("qkv"):
        assert (own.read(name) == heads[:, i].reshape(4, 4).numpy()).all()
    own.release("q", 0, 64)


def test_rows_of_unit_length(tmp_path: Path) -> None:
    own = mapped(tmp_path, {"head": Source("fused", unit_rows=True)}, {"head": (12, 4)})
    assert own.tensors["head"].dtype == "f32"
    expected = torch.nn.functional.normalize(FUSED)
    assert torch.allclose(torch.from_numpy(own.read("head")), expected, atol=1e-6)


def test_values_that_are_made_by_softplus(tmp_path: Path) -> None:
    own = mapped(tmp_path, {"alpha": Source("fused", softplus=True)}, {"alpha": (12, 4)})
    expected = torch.nn.functional.softplus(FUSED.double()).float()
    assert own.tensors["alpha"].dtype == "f32"
    assert torch.allclose(torch.from_numpy(own.read("alpha")), expected, rtol=1e-7)


def test_transposed_matrices_and_added_constants(tmp_path: Path) -> None:
    sources = {
        "a": Source("fused", ((0, 1),), transposed=True),
        "b": Source("fused", ((1, 4),), transposed=True),
        "norm": Source("norm", plus=1.0),
    }
    own = mapped(tmp_path, sources, {"a": (1, 12), "b": (3, 12)})
    assert (own.read("b") == FUSED.T[1:].numpy()).all()
    assert own.tensors["norm"].dtype == "f32"
    assert own.read("norm").tolist() == [1.5, 0.0]


def test_transposed_rows_of_each_head(tmp_path: Path) -> None:
    heads = {"k": ((0, 4), (6, 10)), "v": ((4, 6), (10, 12))}
    turned = tuple(Source("fused", (rows,), rows_transposed=True) for rows in heads["k"])
    sources: Sources = {"k": turned, "v": Source("fused", heads["v"])}
    own = mapped(tmp_path, sources, {"k": (8, 4), "v": (4, 4)})
    assert (own.read("k") == torch.cat((FUSED[:4].T, FUSED[6:10].T)).numpy()).all()
    own.release("k")
    own.release("v", 0, 64)
    assert (own.read("v") == torch.cat((FUSED[4:6], FUSED[10:])).numpy()).all()


def test_matrices_of_a_stack_and_a_stack_of_matrices(tmp_path: Path) -> None:
    stack = torch.randn(3, 4, 2)
    apart = {f"x{i}": torch.randn(2, 5) for i in range(2)}
    sources: Sources = {f"e{i}": Source("stack", ((0, 4),), index=i) for i in range(3)}
    sources = sources | {"all": (Source("x0"), Source("x1"))}
    shapes = {f"e{i}": (4, 2) for i in range(3)} | {"all": (4, 5)}
    own = mapped_as(checkpoint(tmp_path / "own", stack=stack, **apart), shapes, sources)
    for i in range(3):
        own.release(f"e{i}", 8, 16)
        assert (own.read(f"e{i}") == stack[i].numpy()).all()
    assert (own.read("all") == torch.cat(list(apart.values())).numpy()).all()


def test_names_without_prefix_and_unread_tensors(tmp_path: Path) -> None:
    tensors = {"h.w": FUSED, "mask": torch.ones(2), "other": torch.ones(2)}
    options: dict[str, Any] = {"unread": ("ma*",), "prefix": "net."}
    bare = mapped_as(checkpoint(tmp_path / "bare", **tensors), {"w": (12, 4)}, {"w": Source("net.h.w")}, **options)
    assert (bare.read("w") == FUSED.numpy()).all()
    assert set(bare.tensors) - {"w"} == {"mask", "other"}
    assert bare.redundant_names() == {"mask"}


BAD: dict[str, tuple[Sources, dict[str, tuple[int, ...]], str]] = {
    "missing": ({"a": Source("gone")}, {"a": (2, 4)}, "lacks tensor 'gone'"),
    "too_few_rows": (
        {"a": Source("fused", ((0, 13),))},
        {"a": (13, 4)},
        r"'fused': shape: expected 13 rows, got \[12",
    ),
    "unread_rows": ({"a": Source("fused", ((0, 5),))}, {"a": (5, 4)}, r"'fused': shape: expected 5 rows, got \[12"),
    "columns": ({"a": Source("fused")}, {"a": (12, 5)}, r"'fused': shape: expected \[12, 5\] for 'a', got \[12, 4"),
    "turned": (
        {"a": Source("fused", rows_transposed=True)},
        {"a": (4, 11)},
        r"'fused': shape: expected \[4, 11\] for 'a', got \[12, 4",
    ),
    "rows": ({"a": Source("fused")}, {"a": (11, 4)}, "'fused': shape: expected 11 rows for 'a'"),
    "vector": ({"a": Source("norm", transposed=True)}, {"a": (2, 1)}, "'norm': shape: expected a matrix"),
    "index": ({"a": Source("fused", index=0)}, {"a": (4,)}, "'fused': shape: expected 1 matrices"),
    "dtype": ({"a": (Source("fused"), Source("norm"))}, {"a": (14, 4)}, "'norm': dtype: expected F32"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_stored_tensor(name: str, tmp_path: Path) -> None:
    sources, shapes, fact = BAD[name]
    with raises(InvalidFileError, match=fact):
        mapped(tmp_path, sources, shapes)


def test_rows_may_repeat_and_leave_gaps(tmp_path: Path) -> None:
    order = (11, 0, 0, 5)
    rows = tuple((row, row + 1) for row in order)
    stored = checkpoint(tmp_path / "own", fused=FUSED)
    own = mapped_as(stored, {"a": (4, 4)}, {"a": Source("fused", rows, rows_transposed=True, has_gaps=True)})
    assert (own.read("a") == FUSED[list(order)].T.numpy()).all()
    part = Source("fused", rows, rows_transposed=True, has_gaps=True, columns=((0, 1), (2, 4)))
    own = mapped_as(stored, {"a": (3, 4)}, {"a": part})
    assert (own.read("a") == FUSED[list(order)].T.numpy()[[0, 2, 3]]).all()
    with raises(InvalidFileError, match=r"'fused': shape: expected 6 rows, got \[12"):
        mapped_as(stored, {"a": (3, 4)}, {"a": Source("fused", rows[1:], has_gaps=True)})


class _Network(Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(4)
        self.c_attn = Linear(4, 6, bias=True)


def test_tables_of_a_network() -> None:
    network = _Network()
    norms = add_to_norms(network)
    assert norms == {"norm.weight": Source("norm.weight", plus=1.0)}
    table = renamed(network, transposed(network, norms, ["c_attn"]), [("norm", "ln"), ("c_attn", "attn")])
    assert table == {
        "norm.weight": Source("ln.weight", plus=1.0),
        "c_attn.weight": Source("attn.weight", transposed=True),
        "c_attn.bias": Source("attn.bias"),
    }


def test_fused_rows_by_groups() -> None:
    network = Module()
    network.layer = Module()
    network.layer.q, network.layer.k = Linear(4, 8), Linear(4, 4)
    assert fused_rows(network, "qk", ("q", "k"), groups=2) == {
        "layer.q.weight": Source("layer.qk.weight", ((0, 4), (6, 10))),
        "layer.k.weight": Source("layer.qk.weight", ((4, 6), (10, 12))),
    }


@pytest.mark.parametrize("model_type", built_in_families())
def test_the_file_tells_what_the_network_does(model_type: str) -> None:
    network = find_network(model_type).Network
    declares = any(hasattr(network, name) for name in ("tensor_sources", "unread_tensors", "tensor_prefix"))
    assert maps_tensors(model_type) == declares


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_a_quantized_folder_has_the_networks_names(scheme: str, tmp_path: Path) -> None:
    folder = save("phi3", tmp_path / "model")
    quantize_checkpoint(open_mapped(folder), tmp_path / "quantized", scheme)
    names = set(Checkpoint.open(tmp_path / "quantized").tensors)
    assert "model.layers.0.self_attn.q_proj.weight_scale" in names
    assert not any("qkv_proj" in name for name in names)
    logits = []
    for path in (folder, tmp_path / "quantized"):
        program = EagerProgram(path, scheme=scheme, threads=1, limits=LIMITS)
        logits.append(run_whole(program, prompt(33)).tobytes())
        program.close()
    assert logits[0] == logits[1]


def test_a_saved_network_opens_again(tmp_path: Path) -> None:
    folder = save("phi3", tmp_path / "model")
    network = load_network(folder)
    save_network(network, tmp_path / "saved")
    saved = dict(load_network(tmp_path / "saved").named_parameters())
    assert all(torch.equal(value, saved[name]) for name, value in network.named_parameters())
    export_bundle(tmp_path / "saved", tmp_path / "saved.psm")


def test_a_folder_made_from_a_bundle_opens_again(tmp_path: Path) -> None:
    folder = save("glm4", tmp_path / "model")
    export_bundle(folder, tmp_path / "model.psm")
    unpack_bundle(tmp_path / "model.psm", tmp_path / "unpacked")
    unpacked = dict(load_network(tmp_path / "unpacked").named_parameters())
    assert all(torch.equal(value, unpacked[name]) for name, value in load_network(folder).named_parameters())


def test_a_wrong_fused_tensor_is_named(tmp_path: Path) -> None:
    folder = save("phi3", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, folder / "model.safetensors", {"format": "pt"})
    for use in (lambda: load_network(folder), lambda: export_bundle(folder, tmp_path / "x.psm")):
        with raises(InvalidFileError, param=name, match=r"shape: expected 224 rows, got \[223"):
            use()
    save_file({n: t for n, t in tensors.items() if n != name}, folder / "model.safetensors", {"format": "pt"})
    with raises(InvalidFileError, param=name, match=f"lacks tensor '{name}'"):
        load_network(folder)


@pytest.mark.parametrize("family", ["mixtral", "ernie4_5_moe", "granitemoe"])
def test_experts_stacked_as_in_memory_are_read(family: str, tmp_path: Path) -> None:
    logits = []
    for original in (True, False):
        folder = tmp_path / str(original)
        build(family).save_pretrained(folder, save_original_format=original)
        program = EagerProgram(folder, threads=1, limits=LIMITS)
        logits.append(run_whole(program, prompt(20)).tobytes())
        program.close()
    assert any(name.endswith(".experts.gate_up_proj") for name in Checkpoint.open(folder).tensors)
    assert logits[0] == logits[1]


def test_a_head_under_its_name_in_memory_is_read(tmp_path: Path) -> None:
    token_ids = prompt(20)
    build("gpt_neox").save_pretrained(tmp_path, save_original_format=False)
    assert "lm_head.weight" in Checkpoint.open(tmp_path).tensors
    program = EagerProgram(tmp_path, threads=1, limits=LIMITS)
    assert relative_error(run_whole(program, token_ids), expected_logits("gpt_neox", token_ids)) < 1e-4
    program.close()


def test_quantizing_stacked_experts_gives_equal_folders(tmp_path: Path) -> None:
    for original in (True, False):
        build("mixtral").save_pretrained(tmp_path / f"{original}", save_original_format=original)
        quantize_checkpoint(open_mapped(tmp_path / f"{original}"), tmp_path / f"quantized_{original}", "w8a8")
    first, second = (load_file(tmp_path / f"quantized_{own}" / "model.safetensors") for own in (True, False))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
