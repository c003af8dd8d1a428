"""``advise``: memory as the core plans it, arithmetic on given probes, wishes, and what the documents say."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from penstock.bench import advise as module
from penstock.bench import step_probe
from penstock.bench.advise import PYTHON_BYTES, Advice, Advise, SchemeRow, Wishes, advise, misses, recommend
from penstock.bench.node_costs import StepSize
from penstock.bench.step_probe import Measured, StepProbe, Workload, expect
from penstock.bench.ways import bundle_commands, ways
from penstock.bench.weightless import Bound, Machine, Weightless, add_up
from penstock.checkpoint.quantize import quantize_checkpoint
from penstock.core import native
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.export import export_bundle
from penstock.graph.passes import assign_scheme
from penstock.graph.without_weights import cut_layers, read_source
from penstock.models.mapped import open_mapped
from penstock.quant.perplexity_cost import PERPLEXITY_COST
from penstock.quant.scheme import SCHEMES
from penstock.runtime.cache import Cache
from penstock.runtime.machine import Memory
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import ProgramLimits
from tests.support.command import DEMO, FOLDER, ROOT
from tests.support.errors import raises
from tests.support.tiny_llama import write_tiny_llama

MACHINE = Machine("avx2", 2, 10e9, {"int8": 400e9, "bf16": 200e9, "f32": 100e9})


@pytest.fixture
def given_probes(monkeypatch):
    """The machine above, and probes of two of six layers: a prompt takes 0.2 s in the core, a step 0.01 s per request.

    The engine adds 0.001 s to a step.
    """

    def probe(graph, folder, work, kv_layout, machine, seconds):
        part = Bound(5e6, 5e6, 0.004, "memory")
        decode = {batch: Measured(0.01 * batch, 0.001, part) for batch in {1, work.concurrency}}
        return StepProbe(2, 256, Measured(0.2, 0.001, part), decode)

    monkeypatch.setattr(module, "machine_of", lambda context: MACHINE)
    monkeypatch.setattr(module, "probe_steps", probe)


def test_the_roofline_adds_up_the_slower_part_of_each_op():
    bound = add_up([(1e9, 1e9, "int8"), (1e6, 80e9, "int8"), (2e9, 300e9, "f32")], MACHINE)
    assert bound.num_bytes == 3.001e9
    assert bound.num_ops == 381e9
    assert bound.seconds == pytest.approx(0.1 + 0.2 + 3.0)
    assert bound.limit == "f32"
    assert add_up([], MACHINE) == Bound(0, 0, 0, "memory")


def test_the_core_scales_with_the_roofline_the_engine_does_not():
    part, whole = Bound(1, 1, 0.002, "memory"), Bound(3, 3, 0.006, "memory")
    expected = expect(whole, Measured(0.004, 0.001, part), engine_steps=2)
    assert expected.native_s == pytest.approx(0.012)
    assert expected.engine_s == 0.002
    assert expected.seconds == pytest.approx(0.014)
    assert expected.share_of_limit == pytest.approx(0.5)


def test_expected_times_follow_from_given_probes(given_probes):
    advice = advise(Advise(DEMO, concurrency=4, prompt_tokens=600, new_tokens=101, schemes=("w8a8",)))
    (row,) = advice.rows
    assert (advice.network, advice.num_layers, advice.only_scheme) == ("llama", 6, "w8a8")
    assert (row.num_layers, row.probed_prompt) == (2, 256)
    assert row.first_token.native_s == pytest.approx(1.165, rel=0.01)
    assert row.first_token.engine_s == 0.002  # a prompt of 600 tokens takes two steps
    assert row.token.native_s == pytest.approx(0.0146, rel=0.01)
    assert row.token.engine_s == 0.001
    assert row.token_alone.native_s == pytest.approx(0.00196, rel=0.01)
    assert row.tokens_per_s == pytest.approx(64.9, rel=0.01)


def test_bytes_and_operations_are_counted_from_the_graph(given_probes):
    work = Workload(100, 20, 1)
    row = advise(Advise(DEMO, prompt_tokens=100, new_tokens=20, schemes=("w8a8",))).rows[0]
    weights = 6 * (256 * 512 + 256 * 256 + 3 * 256 * 704) + 256 * 4096
    attention = 6 * 4 * 111 * 256
    assert work.decode(1) == StepSize((110,), (1,), 4, 1)
    assert row.token.bound.num_ops == pytest.approx(2 * weights + attention, rel=0.02)  # and norms, nominally
    kv_bytes = 111 * row.plan.kv_page_bytes / 32
    assert weights < row.token.bound.num_bytes - kv_bytes < 1.1 * weights
    assert row.first_token.bound.num_ops > 100 * 2 * (weights - 256 * 4096) * 5 / 6  # of the last layer only one row


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8", "f32"])
def test_memory_is_what_the_core_plans_for_the_export(given_probes, tmp_path, scheme):
    row = advise(Advise(DEMO, concurrency=8, prompt_tokens=300, new_tokens=100, schemes=(scheme,))).rows[0]
    export_bundle(FOLDER, tmp_path / "model.psm", scheme=scheme)
    limits = ProgramLimits(max_tokens=512, max_requests=8, context_len=400)
    program, _ = NativeProgram.open(tmp_path / "model.psm", limits=limits)
    try:
        assert row.plan == program.info.plan
        assert row.memory_bytes == row.plan.total_bytes + PYTHON_BYTES
    finally:
        program.close()
    assert row.device_bytes < row.plan.total_bytes


@pytest.mark.long
def test_a_folder_gives_the_plans_of_its_bundle(given_probes, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    schemes = ("w8a8", "w4a16")
    folder, bundle = (advise(Advise(model, schemes=schemes)) for model in (FOLDER, DEMO))
    assert [row.plan for row in folder.rows] == [row.plan for row in bundle.rows]
    assert folder.only_scheme is None
    assert list(tmp_path.iterdir()) == []  # nothing was exported


def test_a_mix_is_planned_as_it_is(given_probes, tmp_path):
    names = (f"model.layers.{layer}.mlp.down_proj" for layer in range(2))
    quantize_checkpoint(open_mapped(write_tiny_llama(tmp_path / "model")), tmp_path / "mix", "w4a8", blacklist=[*names])
    quantize_checkpoint(open_mapped(tmp_path / "model"), tmp_path / "plain", "w4a8")
    found = {}
    for name in ("mix", "plain"):
        export_bundle(tmp_path / name, tmp_path / f"{name}.psm")
        found[name] = advise(Advise(tmp_path / f"{name}.psm", schemes=("w4a8", "w8a8"), prompt_tokens=8, new_tokens=4))
    assert (found["plain"].mixed_schemes, found["mix"].mixed_schemes) == ({}, {"w4a8": 6, "f32": 2, "w8a8": 1})
    weights = {name: [row.plan.weight_bytes for row in advice.rows] for name, advice in found.items()}
    assert weights["mix"][0] > weights["plain"][0]  # the layers in floats
    assert weights["mix"][1] == weights["plain"][1]


@pytest.mark.long
def test_a_cached_bundle_saves_the_capture(given_probes, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    Cache().find_or_build(FOLDER, "w4a8")
    monkeypatch.setattr(module, "build_in_child", lambda *_, **__: pytest.fail("captured again"))
    (row,) = advise(Advise(FOLDER, schemes=("w8a8",))).rows
    assert row.plan == advise(Advise(DEMO, schemes=("w8a8",))).rows[0].plan


def test_what_does_not_fit_is_not_measured(given_probes, monkeypatch):
    monkeypatch.setattr(module, "memory", lambda: Memory(80_000_000, 24 << 30, None))
    advice = advise(Advise(DEMO, schemes=("f32", "w4a8"), prompt_tokens=64, new_tokens=32))
    assert [row.fits for row in advice.rows] == [False, True]
    assert advice.rows[0].missed == ["available_memory"]
    assert advice.rows[0].token is None
    assert advice.recommended == "w4a8"


def test_large_models_are_measured_in_part(monkeypatch, tmp_path):
    """A roofline that takes too long cuts the layers, then the prompt."""
    monkeypatch.setattr(step_probe, "_FILL_BYTES_PER_S", 1e15)
    graph = assign_scheme(read_source(DEMO)[0], "w8a8")
    work = Workload(512, 64, 2)
    for slower, layers, prompt in ((1, 6, 512), (40, 3, 512), (10_000, 2, 32)):
        machine = Machine("avx2", 1, 40e9 / slower, dict.fromkeys(("int8", "bf16", "f32"), 1e12 / slower))
        model, smaller = step_probe._cut(graph, tmp_path, work, "auto", machine, 0.5)
        assert (len(model.graph.states), smaller.prompt_tokens) == (layers, prompt)
        assert smaller.prompt_tokens + smaller.new_tokens == 576
        model.close()
    assert list(tmp_path.iterdir()) == []


def test_layers_add_equal_parts_to_the_roofline(tmp_path):
    graph = assign_scheme(read_source(DEMO)[0], "w4a8")
    work, seconds = Workload(64, 32, 2), []
    with native.Context(1) as context:
        for count in (2, 4, 6):
            model = Weightless(tmp_path / "m.psm", cut_layers(graph, count))
            plan = model.plan(context, work.limits(2, "auto"))
            seconds.append(model.bound([work.decode(2)], plan.kv_page_bytes, "auto", MACHINE).seconds)
            model.close()
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])


def row(scheme: str, first_s: float = 0.1, token_s: float = 0.01, rate: float = 100.0, memory: int = 1000) -> SchemeRow:
    plan = native.MemoryPlan(memory, 0, 0, 0, 0, memory, 1)
    bound = Bound(1, 1, 0.001, "memory")
    times = [expect(bound, Measured(seconds, 0.0, bound)) for seconds in (first_s, token_s, token_s)]
    return SchemeRow(scheme, PERPLEXITY_COST[scheme], plan, memory, memory, True, *times, tokens_per_s=rate)


@pytest.mark.parametrize(
    ("wishes", "missed"),
    [
        (Wishes(), []),
        (Wishes(0.1, 0.01, 100.0, 1000), []),
        (Wishes(first_token_s=0.09), ["first_token"]),
        (Wishes(latency_s=0.009), ["latency"]),
        (Wishes(tokens_per_s=101.0, memory_bytes=999), ["memory", "throughput"]),
    ],
)
def test_each_wish_is_compared_with_its_figure(wishes, missed):
    assert misses(row("w8a8"), wishes) == missed


def test_the_fastest_of_the_best_schemes_is_recommended():
    rows = [row("f32", rate=10), row("w8a16", rate=20), row("w8a8", rate=30), row("w4a8", rate=50)]
    assert recommend(rows) == "w8a8"
    for each in rows[:3]:
        each.missed = ["latency"]
    assert recommend(rows) == "w4a8"
    rows[3].missed = ["memory"]
    assert recommend(rows) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"new_tokens": True}, "new_tokens"),
        ({"schemes": ()}, "schemes"),
        ({"schemes": ("w8a8", "w8a8")}, "schemes"),
        ({"schemes": ("w3a8",)}, "schemes"),
        ({"prompt_tokens": 1024}, "prompt_tokens"),
        ({"new_tokens": 1024}, "new_tokens"),
        ({"network": "x.py:Net"}, "network"),
        ({"kv_cache": "f64"}, "kv_cache"),
    ],
)
def test_errors_name_the_field(fields, param):
    with raises(InvalidArgumentError, param=param) as error:
        advise(Advise(DEMO, **fields))
    assert error.value.param == param


def test_a_graph_that_ends_in_token_ids_is_refused(tmp_path):
    export_bundle(FOLDER, tmp_path / "argmax.psm", scheme="w8a8", tail="argmax", without_weights=True)
    with raises(UnsupportedError, param="model", match="logits, "):
        advise(Advise(tmp_path / "argmax.psm"))


@pytest.mark.parametrize("model", [DEMO, FOLDER], ids=["bundle", "folder"])
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_the_commands_of_each_way_are_understood(model, scheme):
    from penstock.cli.main import make_parser

    only = "w8a8" if model == DEMO else None
    chosen = row(scheme)
    work = Workload(100, 28, 4)
    advice = Advice("llama", None, work, "int8", MACHINE, 0.0, 1 << 30, only, 6, [chosen], scheme)
    found = {way.name: way for way in ways(advice, str(model), chosen)}
    assert list(found) == ["Python", "bundle", "service", "device"]
    assert found["device"].token_s == chosen.token.native_s
    parser = make_parser()
    for way in found.values():
        for command in way.commands:
            words = shlex.split(command)
            if words[0] == "penstock":
                assert parser.parse_args(words[1:])
            elif words[0] == "python":
                compile(words[2], "command", "exec")
    made = bundle_commands(advice, str(model), scheme)
    if (model, scheme) == (DEMO, "w8a8"):
        assert made == (str(DEMO), [])
    else:
        source = "CHECKPOINT" if model == DEMO else str(model)
        name = f"{'demo' if model == DEMO else 'model'}-{scheme}.psm"
        assert made == (name, [f"penstock export {source} {name} --scheme {scheme}"])


def test_the_cost_in_perplexity_is_what_the_document_says():
    text = (ROOT / "docs" / "guides" / "quantization.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [\d.]+ \| ([+-][\d.]+) % \|", text, re.MULTILINE)
    assert {scheme: abs(float(cost)) / 100 for scheme, cost in rows} == pytest.approx(PERPLEXITY_COST)
    assert list(PERPLEXITY_COST) == [name for name, scheme in SCHEMES.items() if not scheme.in_blocks]


def test_figures_can_be_printed_as_json(given_probes, capsys):
    from penstock.cli.main import main

    assert main(["advise", str(DEMO), "--schemes", "w8a8,w4a8", "--latency", "1e-3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"] is None
    assert [each["missed"] for each in found["rows"]] == [["latency"], ["latency"]]
    assert found["rows"][0]["first_token"]["share_of_limit"] == pytest.approx(0.02)
    assert found["rows"][1]["commands"] == ["penstock export CHECKPOINT demo-w4a8.psm --scheme w4a8"]
    assert Path(found["rows"][0]["ways"][3]["commands"][0].split()[1]) == DEMO
