"""The tracer: its graphs equal those of torch.export, and it needs no PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config import ConfigReader
from penstock.errors import UnsupportedError
from penstock.graph.capture import capture
from penstock.graph.export import export_bundle
from penstock.graph.tracer import trace_network
from penstock.models.meta import construct_on_meta
from penstock.models.registry import find_network
from penstock.nn import Attention, Batch, Embedding, Linear, LMHead, Module, silu_mul
from penstock.symbolic import arrays, modules
from tests.support import graph_digest
from tests.support.encoders import DEBERTA_V3
from tests.support.families import FAMILIES, config_of, save
from tests.support.gguf_files import llama_file
from tests.support.graph_digest import constant_items, digest_of, graph_items
from tests.support.marks import mostly_long

_BERT = {"vocab_size": 103, "hidden_size": 80, "intermediate_size": 100, "num_hidden_layers": 2, "pad_token_id": 0}
_BERT |= {"num_attention_heads": 5, "max_position_embeddings": 100, "hidden_act": "gelu", "type_vocab_size": 2}
_T5 = {"vocab_size": 103, "d_model": 64, "d_ff": 96, "num_heads": 4, "d_kv": 16, "num_layers": 2}
_GATED = {"feed_forward_proj": "gated-gelu"}
_DISTIL = {"vocab_size": 103, "dim": 80, "hidden_dim": 100, "n_layers": 2, "n_heads": 5, "max_position_embeddings": 100}
_MODERN = {"hidden_activation": "gelu", "num_hidden_layers": 4, "local_attention": 16}
_NOMIC = {"vocab_size": 103, "n_embd": 80, "n_inner": 100, "n_layer": 2, "n_head": 5, "n_positions": 100}
_NOMIC |= {"activation_function": "swiglu", "rotary_emb_base": 1000, "type_vocab_size": 2}
_GLM = {"vocab_size": 503, "hidden_size": 96, "inner_hidden_size": 100, "num_layers": 3, "num_attention_heads": 4}
_GLM |= {"max_sequence_length": 256, "bos_token_id": 502, "position_encoding_2d": True}
OTHERS: dict[str, tuple[str, str, dict[str, object]]] = {
    "chatglm1": ("chatglm", "ChatGLMForConditionalGeneration", _GLM),
    "t5": ("t5", "T5ForConditionalGeneration", _T5),
    "t5_encoder": ("t5", "T5EncoderModel", _T5 | _GATED),
    "umt5": ("umt5", "UMT5ForConditionalGeneration", _T5 | _GATED),
    "bert": ("bert", "BertModel", _BERT),
    "bert_words": ("bert", "BertForMaskedLM", _BERT),
    "roberta": ("roberta", "RobertaModel", _BERT | {"pad_token_id": 1}),
    "distilbert": ("distilbert", "DistilBertModel", _DISTIL),
    "modernbert": ("modernbert", "ModernBertModel", _BERT | _MODERN),
    "eurobert": ("eurobert", "EuroBertModel", _BERT | {"hidden_act": "silu"}),
    "mpnet": ("mpnet", "MPNetModel", _BERT),
    "electra": ("electra", "ElectraModel", _BERT | {"embedding_size": 40}),
    "electra_words": ("electra", "ElectraForMaskedLM", _BERT | {"embedding_size": 40}),
    "albert": ("albert", "AlbertForMaskedLM", _BERT | {"embedding_size": 40, "num_hidden_groups": 2}),
    "albert_tokens": ("albert", "AlbertForTokenClassification", _BERT | {"embedding_size": 40}),
    "deberta-v2": ("deberta-v2", "DebertaV2ForMaskedLM", _BERT | DEBERTA_V3 | {"type_vocab_size": 0}),
    "nomic_bert": ("nomic_bert", "NomicBertModel", _NOMIC),
}
"""Families outside the table: model_type, class and sizes."""

CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {name: partial(config_of, name) for name in FAMILIES}
CONFIGS |= {
    name: partial(dict, values, model_type=model_type, architectures=[architecture])
    for name, (model_type, architecture, values) in OTHERS.items()
}
DEMO = Path(__file__).parents[2] / "demo" / "model"
QUICK = ("llama_tied_one_kv_head", "qwen2_windows", "qwen3_moe")


@pytest.mark.parametrize("name", mostly_long(CONFIGS, *QUICK))
def test_trace_equals_export(name: str) -> None:
    built = construct_on_meta(ConfigReader(CONFIGS[name]()))
    sizes = {"network_name": name, "context_len": built.context_len, "vocab_size": built.vocab_size}
    traced, exported = trace_network(built.network, **sizes), capture(built.network, **sizes)
    items, expected = graph_items(traced.graph), graph_items(exported.graph)
    for field, value in expected.items():
        assert items[field] == value, field
    assert constant_items(traced.constants) == constant_items(exported.constants)


@pytest.mark.parametrize(
    "rows", [pytest.param(QUICK, id="some"), pytest.param(CONFIGS, id="all", marks=pytest.mark.long)]
)
def test_families_without_pytorch(rows: Iterable[str], tmp_path: Path) -> None:
    """Graphs, and bundles of a folder and a GGUF file, are those of a process with PyTorch."""
    folder, file = save("llama_tied_one_kv_head", tmp_path / "folder"), tmp_path / "file.gguf"
    file.write_bytes(llama_file())
    configs = {name: CONFIGS[name]() for name in rows}
    words = [str(word) for source in (folder, file) for word in (source, tmp_path / f"{source.name}.psm")]
    done = subprocess.run(
        [sys.executable, graph_digest.__file__, *words],
        input=json.dumps(configs), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {name: digest_of(config) for name, config in configs.items()}
    for source in (folder, file):
        export_bundle(source, tmp_path / "expected.psm")
        assert (tmp_path / f"{source.name}.psm").read_bytes() == (tmp_path / "expected.psm").read_bytes()


@pytest.mark.parametrize("command", ["penstock.graph.export_child MODEL OUT", "penstock plan MODEL --no-probe"])
def test_capturing_a_built_in_network_does_not_import_pytorch(command: str, tmp_path: Path) -> None:
    words = command.replace("MODEL", str(DEMO)).replace("OUT", str(tmp_path / "out.psm")).split()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert " penstock.graph.tracer\n" in done.stderr
    assert " torch\n" not in done.stderr


def test_running_a_bundle_imports_no_checkpoint(tmp_path: Path) -> None:
    export_bundle(DEMO, tmp_path / "demo.psm")
    words = ["penstock", "run", str(tmp_path / "demo.psm"), "def", "--max-tokens", "1"]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "penstock.llm.llm" in imported
    needless = ("checkpoint.folder", "checkpoint.tokenizer_process", "llm.classify", "quant.folder", "sharding.folder")
    assert not imported & {f"penstock.{name}" for name in needless}


class Tiny(Module):
    """Embedding, something, head: ``something`` is the test's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(50, 16)
        self.up = Linear(16, 32)
        self.attention = Attention(2, 1, 8)
        self.head = LMHead(16, 50)

    def something(self, x: Tensor, batch: Batch) -> Tensor:
        return x

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.something(self.embed(batch.token_ids), batch), batch.output_rows)


_OTHER: dict[str, Any] = {}

REFUSED = {
    "method": (lambda self, x, batch: x.softmax(-1), r"Tensor\.softmax in module \(root\)"),
    "scalar": (lambda self, x, batch: x * 2.0, "mul of a tensor and float"),
    "weight": (lambda self, x, batch: x + self.embed.weight, "add of a tensor and Parameter"),
    "broadcast": (lambda self, x, batch: x + x[:, :1], "add in module"),
    "in_place": (lambda self, x, batch: x.__iadd__(x), "values of a tensor"),
    "columns": (lambda self, x, batch: self.up(x)[:, ::2], "the index"),
    "rows": (lambda self, x, batch: x[1:], "the index"),
    "view": (lambda self, x, batch: x.view(-1, 8), "view"),
    "split": (lambda self, x, batch: x.split(2), "split of dimension 0"),
    "branch": (lambda self, x, batch: x if batch.positions[0] == 0 else x + x, "the index"),
    "values": (lambda self, x, batch: x if x else x + x, "values of a tensor"),
    "size": (lambda self, x, batch: x if x.shape[0] == 6 else x + x, "fixes a size"),
    "sizes": (lambda self, x, batch: x.view(x.shape[0] + 1, -1), "fixes a size"),
    "temporary": (lambda self, x, batch: silu_mul(x, self.embed.weight[:1]), "silu_mul with Tensor as up"),
    "kind": (lambda self, x, batch: silu_mul(x, self.embed.weight), "silu_mul with a weight as up"),
    "power": (lambda self, x, batch: x**2, "values of a tensor"),
    "divmod": (lambda self, x, batch: divmod(x, x), "values of a tensor"),
    "and": (lambda self, x, batch: x & x, "values of a tensor"),
    "plus": (lambda self, x, batch: +x, "values of a tensor"),
    "round": (lambda self, x, batch: round(x), "values of a tensor"),
    "size_power": (lambda self, x, batch: x.shape[0] ** 2, "fixes a size"),
    "chunk": (lambda self, x, batch: x.chunk(0, 1), "chunk into 0"),
    "split_zero": (lambda self, x, batch: x.split(0, 1), "split of 16 columns into 0"),
    "split_negative": (lambda self, x, batch: x.split([20, -4], 1), "split of 16 columns"),
    "dtype": (lambda self, x, batch: x if x.dtype == torch.float32 else x + x, r"Tensor\.dtype"),
    "other_trace": (lambda self, x, batch: silu_mul(x, _OTHER.setdefault("x", x)), "another trace"),
    "foreign": (lambda self, x, batch: Linear(16, 16)(x), "a call of Linear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_that_it_lacks_is_refused_by_name(name: str) -> None:
    something, message = REFUSED[name]
    with torch.device("meta"):
        network = type("Changed", (Tiny,), {"something": something})()
    if name == "other_trace":
        trace_network(network, network_name="tiny", context_len=64, vocab_size=50)
    with pytest.raises(UnsupportedError, match=message):
        trace_network(network, network_name="tiny", context_len=64, vocab_size=50)


def test_views_are_those_of_an_export() -> None:
    """Views that no family uses: they are folded as ``graph.views`` folds those of PyTorch."""

    def something(self: Tiny, x: Tensor, batch: Batch) -> Tensor:
        wide = self.up(x)
        left, right = wide.split([16, 16], dim=1)
        first, second, third = wide.chunk(3, -1)
        heads = wide.view(x.shape[0], -1, 8)[:, 1:3].view(-1, 16)
        assert (first.shape[1], second.shape[1], third.shape[1]) == (11, 11, 10)
        return silu_mul(left, right) + silu_mul(heads, wide[:, -16:])

    with torch.device("meta"):
        network = type("Changed", (Tiny,), {"something": something})()
    sizes = {"network_name": "tiny", "context_len": 64, "vocab_size": 50}
    traced, exported = trace_network(network, **sizes).graph, capture(network, **sizes).graph
    reads = [[graph.values[i.name] for node in graph.nodes if node.op == "silu_mul" for i in node.inputs]
             for graph in (traced, exported)]  # fmt: skip
    assert [[(v.base, v.offset, v.shape) for v in values] for values in reads[:1]] == [
        [(v.base, v.offset, v.shape) for v in values] for values in reads[1:]
    ]


def build_network(torch: ModuleType, nn: ModuleType) -> dict[str, list[str]]:
    """What a module says of its parts, after all that families do with modules."""

    class Leaf(nn.Module):
        def __init__(self) -> None:
            self.early = 1
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3), requires_grad=False)
            self.bias = None
            self.register_buffer("state", torch.zeros(4), persistent=False)
            self.register_buffer("none", None, persistent=False)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.none = Leaf(), None
            self.layers = nn.ModuleList(Leaf() for _ in range(2))
            self.parts = nn.ModuleDict({"self": Leaf(), "other": nn.Identity()})
            self.layers[1].weight = self.first.weight
            self.layers[0] = Leaf()
            self.first.state = torch.ones(2)
            self.first.bias = nn.Parameter(torch.zeros(1), requires_grad=False)
            self.first.weight, self.first.early = None, self.layers[0].weight
            self.again = self.layers[1]

    root = Root()
    return {
        "modules": [name for name, _ in root.named_modules()],
        "every": [name for name, _ in root.named_modules(remove_duplicate=False)],
        "children": [name for name, _ in root.named_children()],
        "parameters": [name for name, _ in root.named_parameters()],
        "all": [name for name, _ in root.named_parameters(remove_duplicate=False)],
        "own": [name for name, _ in root.first.named_parameters(recurse=False)],
        "buffers": [f"{name}{tuple(value.shape)}" for name, value in root.named_buffers()],
        "every buffer": [name for name, _ in root.named_buffers(remove_duplicate=False)],
        "part": [str(root.get_submodule("parts.self").get_parameter("weight").ndim), str(len(root.layers))],
        "known": [name for name in ("none", "early", "bias", "weight", "absent") if hasattr(root.first, name)],
    }


def test_own_modules_are_those_of_pytorch() -> None:
    assert build_network(arrays, modules) == build_network(torch, torch.nn)  # type: ignore[arg-type]


def test_arrays_without_values_have_their_type() -> None:
    with arrays.device("meta"):
        parameter = modules.Parameter(arrays.zeros(2, 3, dtype="float16"))
    assert (parameter.dtype, parameter.nbytes, parameter.is_meta) == ("float16", 12, True)


def test_a_module_of_two_names_is_one() -> None:
    """Its weights appear once, under their first names, as ``torch.export`` has them."""

    def something(self: Tiny, x: Tensor, batch: Batch) -> Tensor:
        return self.second(self.first(x))

    with torch.device("meta"):
        network = type("Changed", (Tiny,), {"something": something})()
        network.first = network.second = Linear(16, 16)
    sizes = {"network_name": "tiny", "context_len": 64, "vocab_size": 50}
    traced, exported = (graph_items(make(network, **sizes).graph) for make in (trace_network, capture))
    for field in ("weights", "properties"):
        assert traced[field] == exported[field]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: arrays.cat, r"torch\.cat"),
        (lambda: modules.Linear, r"torch\.nn\.Linear"),
        (lambda: modules.Parameter(arrays.ones(2)) * 2, "Parameter values"),
        (lambda: arrays.ones(2)[0], "Array values"),
    ],
)
def test_what_own_modules_lack_is_refused_by_name(use: Callable[[], object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        use()
    assert not hasattr(arrays, "__wrapped__")
    assert not hasattr(modules, "__wrapped__")


def test_a_built_in_network_of_a_users_file_is_not_traced(tmp_path: Path) -> None:
    """The file may have changed it, with functions of PyTorch that the tracer lacks."""
    reader = ConfigReader(config_of("llama"))
    assert construct_on_meta(reader).is_built_in
    definition = find_network("llama")
    (tmp_path / "patched.py").write_text(
        f"from {definition.Network.__module__} import {definition.Network.__name__} as Net\n"
        f"from {definition.Config.__module__} import {definition.Config.__name__} as Config\n"
    )
    assert not construct_on_meta(reader, f"{tmp_path}/patched.py:Net").is_built_in


def test_names_that_need_pytorch_say_so() -> None:
    script = """
import sys
sys.modules["torch"] = None
import penstock, penstock.nn
for home, name in (("", "load_network"), ("", "RoundToNearest"), ("", "custom_op"), ("nn", "load_weights")):
    try:
        getattr(penstock.nn if home else penstock, name)
    except penstock.UnsupportedError as error:
        print(name, name in str(error))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        word for name in ("load_network", "RoundToNearest", "custom_op", "load_weights") for word in (name, "True")
    ]
