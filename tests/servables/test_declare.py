"""Declarations in servable.py: specs, stages, models, methods and settings, and errors that name the mistake."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from penstock import servable
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.servables.api.declare import collect_declarations
from penstock.servables.api.manifest import manifest_from_json, manifest_to_json
from penstock.servables.api.manifest_builder import build_manifest
from penstock.servables.api.specs import Spec, parse_spec
from tests.support.errors import raises

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "servables.md"


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("FP32[64]", Spec("FP32", (64,))),
        ("INT64[]", Spec("INT64", ())),
        (" TEXT [ ]", Spec("TEXT", ())),
        ("BYTES[-1, 3]", Spec("BYTES", (-1, 3))),
    ],
)
def test_specs_are_read(written: str, found: Spec) -> None:
    assert parse_spec(written, "x") == found
    assert parse_spec(str(found), "x") == found


@pytest.mark.parametrize(
    "written",
    ["", "FP32", "FP31[2]", "FP32[0]", "FP32[-2]", "FP32[1,]", "FP32[x]", 3, None, "FP32[" + "1," * 16 + "1]"],
)
def test_invalid_specs_are_refused_by_name(written: object) -> None:
    with raises(InvalidArgumentError, param="image"):
        parse_spec(written, "image")


def test_shapes_that_fit_a_spec() -> None:
    spec = parse_spec("FP32[-1,3]", "x")
    assert spec.fits((7, 3))
    assert not spec.fits((7, 4))
    assert not spec.fits((3,))
    assert spec.accepts(parse_spec("FP32[2,3]", "x"))
    assert not spec.accepts(parse_spec("FP64[2,3]", "x"))


def digits() -> servable.Model:
    return servable.model(
        "digits.onnx", inputs={"image": "FP32[64]"}, outputs={"scores": "FP32[10]"}, batch_size=32, max_delay_ms=2
    )


def test_a_method_becomes_units_and_steps() -> None:
    """Consecutive stages with equal rules form one unit; a model separates them."""
    with collect_declarations() as declared:
        model = digits()

        @servable.stage(outputs={"image": "FP32[64]"}, batch_size=32)
        def halve(image):
            return image / 2

        @servable.stage(outputs={"image": "FP32[64]"}, batch_size=32)
        def shift(image):
            return image - 1

        @servable.stage(outputs={"label": "INT64[]"})
        def best(scores):
            return scores.argmax()

        @servable.method(inputs={"image": "FP32[64]"}, outputs={"label": "INT64[]", "scores": "FP32[10]"})
        def classify(image):
            scores = model(shift(halve(image)))
            return best(scores), scores

        @servable.method(inputs={"image": "FP32[64]"}, outputs={"scores": "FP32[10]"})
        def scores(image):
            return model(image=image)

        manifest, programs = build_manifest(declared)
    assert [(one.kind, one.names) for one in manifest.units] == [
        ("stages", ("halve", "shift")), ("model", ("digits.onnx",)), ("stages", ("best",)),
    ]  # fmt: skip
    assert [one.unit for one in manifest.methods[0].steps] == [0, 1, 2]
    assert [one.unit for one in manifest.methods[1].steps] == [1], "methods share a model's unit"
    assert set(programs) == {0, 2}
    assert manifest_from_json(manifest_to_json(manifest)) == manifest


def test_independent_branches_share_a_trip() -> None:
    with collect_declarations() as declared:
        model = digits()

        @servable.stage(outputs={"y": "FP32[64]"})
        def one(x):
            return x

        @servable.stage(outputs={"z": "FP32[10]"})
        def two(a, b):
            return a

        @servable.method(inputs={"x": "FP32[64]", "y": "FP32[64]"}, outputs={"z": "FP32[10]"})
        def both(x, y):
            return two(model(one(x)), one(y))

        manifest, _ = build_manifest(declared)
    assert [one.names for one in manifest.units] == [("one", "one"), ("digits.onnx",), ("two",)]


def test_a_stage_outside_a_method_is_its_function() -> None:
    @servable.stage(outputs={"y": "FP32[]"})
    def double(x):
        return x * 2

    assert double(4) == 8


def stage(outputs: str = "FP32[2]", **named: object):
    @servable.stage(outputs={"y": outputs}, **named)
    def one(x):
        return x

    return one


def method(function, inputs: str = "FP32[2]", outputs: str = "FP32[2]") -> None:
    def called(x):
        return function(x)

    servable.method(inputs={"x": inputs}, outputs={"y": outputs})(called)


def through(function) -> None:
    one = stage()
    method(lambda x: function(one, x))


def two_values() -> None:
    @servable.stage(outputs={"y": "FP32[2]"})
    def two(a, b):
        return a

    method(lambda x: two(x, b=3))


WRONG = {
    "no method": (lambda: stage(), "declares no method"),
    "output's type": (lambda: method(stage("FP64[2]")), r"method called: output y must be FP32\[2\].*FP64"),
    "model's input": (
        lambda: method(servable.model("a.onnx", inputs={"x": "FP32[3]"}, outputs={"y": "FP32[2]"})),
        r"model a.onnx: x must be FP32\[3\]",
    ),
    "stage's input": (lambda: method(stage(inputs={"x": "INT8[2]"})), r"stage one: x must be INT8\[2\]"),
    "too many": (lambda: through(lambda one, x: one(x, x)), "1 arguments, got 2"),
    "by a wrong name": (lambda: through(lambda one, x: one(z=x)), "x; .* z"),
    "nothing given": (lambda: through(lambda one, x: one(x, z=x)), "x; .* z"),
    "arithmetic": (lambda: through(lambda one, x: one(x) + 1), "compute in a stage"),
    "a condition": (lambda: through(lambda one, x: one(x) if x else x), "compute in a stage"),
    "an attribute": (lambda: through(lambda one, x: one(x.T)), "compute in a stage"),
    "a constant": (lambda: through(lambda one, x: one(3.0, x)), "takes 1 arguments"),
    "a constant by name": (lambda: two_values(), "b .*, got 3"),
    "no value": (lambda: method(lambda x: 3), "1 values"),
    "unused": (lambda: through(lambda one, x: (one(x), one(x))[0]), "is not used"),
    "no step": (lambda: method(lambda x: x), "calls no stage"),
    "twice": (lambda: (stage(), stage()), "stage one .*twice"),
    "no parameters": (lambda: servable.method(inputs={"z": "FP32[2]"}, outputs={"y": "FP32[2]"})(lambda x: x), "name"),
    "a path": (lambda: servable.model("/a.onnx", inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"}), "folder"),
    "out of the folder": (
        lambda: servable.model("../a.onnx", inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"}),
        "folder",
    ),
    "an ending": (
        lambda: servable.model("a.pkl", inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"}),
        r"\.onnx; 'a\.pkl'",
    ),
    "an unused model": (
        lambda: (servable.model("a.onnx", inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"}), method(stage())),
        "a.onnx is not used",
    ),
    "sizes": (lambda: stage(batch_size=0), "batch_size: .* 1 to 1048576, got 0"),
    "a model's sizes": (
        lambda: servable.model("a.onnx", inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"}, batch_size=2.0),
        r"batch_size: .* got 2\.0",
    ),
    "a delay": (lambda: stage(batch_size=2, max_delay_ms=-1), "max_delay_ms: .* got -1$"),
    "no delay": (lambda: stage(batch_size=2, max_delay_ms=float("nan")), "max_delay_ms: .* got nan"),
    "a preferred size": (
        lambda: stage(batch_size=4, preferred_sizes=2),
        r"preferred_sizes: .*\(2, 4\), got 2",
    ),
    "a padded size": (lambda: stage(batch_size=4, padded_sizes="24"), "padded_sizes: .* got '24'"),
    "a size too many": (lambda: stage(batch_size=4, preferred_sizes=(2, 5)), "preferred_sizes: .* got 5"),
    "sizes without batches": (lambda: stage(max_delay_ms=1), "require batch_size"),
    "workers": (lambda: servable.settings(workers=0), "workers"),
    "threads": (lambda: servable.settings(model_threads=0), "model_threads"),
    "what waits": (lambda: servable.settings(max_waiting=0), "max_waiting"),
    "bytes of a batch": (lambda: servable.settings(max_batch_mib=513), "max_batch_mib"),
    "open requests": (lambda: servable.method(inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"}, max_open=0), "max_open"),
    "open prompts": (lambda: servable.language_model("a.psm", max_open=True), "max_open"),
    "a limit": (lambda: servable.settings(memory_limit_mib=1), "memory_limit_mib"),
    "a timeout": (lambda: servable.settings(timeout_s=0), "timeout_s"),
    "an option of a stage": (lambda: servable.stage(batch=3), "stage: .*outputs, inputs, batch_size"),
    "a setting": (lambda: servable.settings(worker=1), "settings: .*workers, .*, got worker$"),
    "a label's version": (lambda: servable.settings(labels={"stable": 0}), "labels: stable: "),
    "a label's flag": (lambda: servable.settings(labels={"stable": True}), "labels: stable: "),
    "a label's name": (lambda: servable.settings(labels={"1st": 1}), "labels: .*'1st'"),
    "versions": (lambda: servable.settings(versions="newest"), "versions"),
    "settings twice": (lambda: (servable.settings(), servable.settings()), "twice"),
    "a default": (lambda: (method(stage()), servable.settings(default_method="x")), "default_method: .* got 'x'"),
    "two sources": (lambda: servable.language_model("a.psm", served="b"), "served=NAME"),
    "a language model as a file": (
        lambda: servable.model("a.gguf", inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"}),
        "a.gguf' is a language model.*servable.language_model",
    ),
    "a folder as a file": (
        lambda: servable.model("weights", inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"}),
        "weights' is a language model.*servable.language_model",
    ),
    "a folder elsewhere": (lambda: servable.language_model("../weights"), "version's folder"),
    "a scheme of a bundle": (lambda: servable.language_model("a.psm", scheme="w8a8"), "^language_model: scheme "),
    "a scheme of another's": (lambda: servable.language_model(served="a", scheme="w8a8"), "^language_model: scheme "),
    "no such scheme": (lambda: servable.language_model("a", scheme="w9"), "w9"),
    "sampling": (lambda: servable.language_model("a.psm", max_token=3), "max_token"),
    "several answers": (lambda: servable.language_model("a.psm", n=2), "one text"),
    "async": (lambda: servable.stage(outputs={"y": "FP32[]"})(_asynchronous), "plain function"),
}


async def _asynchronous(x):
    return x


@pytest.mark.parametrize("name", WRONG)
def test_declaration_errors_name_the_mistake(name: str) -> None:
    declare, message = WRONG[name]

    def load() -> None:
        with collect_declarations() as declared:
            declare()
            build_manifest(declared)

    with pytest.raises(InvalidArgumentError, match=message):
        load()


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"settings": {}, "methods": [], "units": 3, "models": {}, "languages": []}']
)
def test_invalid_plans_are_refused(text: str) -> None:
    with raises(InvalidFileError, code="invalid_manifest"):
        manifest_from_json(text)


def test_a_plan_whose_steps_do_not_fit_is_refused() -> None:
    with collect_declarations() as declared:
        method(stage())
        manifest, _ = build_manifest(declared)
    text = manifest_to_json(manifest)
    for old, new in (
        ('"unit": 0', '"unit": 1'),
        ('"inputs": [0]', '"inputs": [1]'),
        ('"num_values": 2', '"num_values": 1'),
    ):
        assert old in text
        with raises(InvalidFileError, code="invalid_manifest"):
            manifest_from_json(text.replace(old, new))


def test_docs_list_all_options() -> None:
    """docs/guides/servables.md, the table of calls: every option of models, and no other; settings are generated."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `servable.")]
    (model,) = [row.partition(" | ")[2] for row in rows if row.startswith("| `servable.model(")]
    given = {"path", "inputs", "outputs"}
    assert {*re.findall(r"`([a-z_]+)`", model)} == {*inspect.signature(servable.model).parameters} - given
