"""The examples of general networks, on tiny networks whose outputs are known."""

from __future__ import annotations

import importlib
import json
import sys
import wave
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

FOLDER = Path(__file__).parents[2] / "examples" / "networks"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a script by its name, as Python does when it runs one."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = [path.stem for path in FOLDER.glob("*.py")]

    def load(name: str) -> ModuleType:
        for other in names:
            monkeypatch.delitem(sys.modules, other, raising=False)
        return importlib.import_module(name)

    yield load
    for name in names:
        sys.modules.pop(name, None)


def save(
    path: Path, nodes: list[Any], inputs: dict[str, Any], outputs: list[str], constants: dict[str, Any], **texts: str
) -> Path:
    """Write an ONNX file; an input is a shape of floats, or an array, whose type and shape it has."""
    kinds = {np.dtype(np.int32): TensorProto.INT32, np.dtype(np.int64): TensorProto.INT64}
    graph = helper.make_graph(
        nodes,
        "net",
        [
            helper.make_tensor_value_info(name, kinds[one.dtype], one.shape)
            if isinstance(one, np.ndarray)
            else helper.make_tensor_value_info(name, TensorProto.FLOAT, one)
            for name, one in inputs.items()
        ],
        [helper.make_value_info(name, helper.make_tensor_type_proto(TensorProto.FLOAT, None)) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(made, texts)
    onnx.save(made, str(path))
    return path


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["example.py", *map(str, arguments)])
    module.main()


def test_resize_is_linear_and_averages(example: Any) -> None:
    common = example("common")
    picture = np.arange(8, dtype=np.float32).reshape(1, 8, 1).repeat(4, 0)
    np.testing.assert_allclose(common.resize(picture, 4, 8), picture, atol=1e-6)
    np.testing.assert_allclose(common.resize(picture, 2, 4)[0, 1:3, 0], [2.5, 4.5], atol=1e-6)
    np.testing.assert_allclose(common.resize(picture, 4, 16)[0, 1:4, 0], [0.25, 0.75, 1.25], atol=1e-6)
    np.testing.assert_allclose(common.resize(np.full((5, 7, 3), 9.0), 3, 11), 9, atol=1e-5)


def test_a_missing_package_is_named(example: Any) -> None:
    with pytest.raises(SystemExit, match="pip install --no-deps no-such-package"):
        example("common").package_file("no_such_package", "net.onnx")


@pytest.fixture
def drawn(example: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a script that reads a drawn page: white, with dark bars, one of which is below two others."""

    def load(name: str) -> ModuleType:
        module = example(name)
        page = np.full((96, 160, 3), 255, np.uint8)
        for top, left, right in ((12, 96, 150), (14, 8, 80), (56, 20, 140)):
            page[top : top + 20, left:right] = (0, 0, 90)
        monkeypatch.setattr(module, "read_picture", lambda _path: page)
        return module

    return load


def test_lines_are_found_and_read_in_order(
    drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = drawn("read_text")
    find = [helper.make_node("Slice", ["x", "two", "three", "one"], ["c"]), helper.make_node("Neg", ["c"], ["map"])]
    detector = save(
        tmp_path / "find.onnx", find, {"x": (None, 3, None, None)}, ["map"], {"one": [1], "two": [2], "three": [3]}
    )
    # A score for each of the first 8 columns: a blank, "b", "b", a blank, "b", "a", " ", " ".
    scores = np.eye(4, dtype=np.float32)[[0, 2, 2, 0, 2, 1, 3, 3]][None] * 0.75
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[0, 1, 2, 3], keepdims=0),
        helper.make_node("Mul", ["m", "nothing"], ["n"]),
        helper.make_node("Add", ["n", "scores"], ["y"]),
    ]
    constants = {"scores": scores, "nothing": np.float32(0)}
    reader = save(tmp_path / "read.onnx", nodes, {"x": (None, 3, 48, None)}, ["y"], constants, character="a\nb")
    run(module, monkeypatch, "page.png", "--detector", detector, "--recognizer", reader)
    assert capsys.readouterr().out == "0.75 bba \n" * 3
    with module.open_network(detector) as network:
        boxes = module.find_lines(network, module.read_picture("page.png"))
    assert [(box.top < 40, box.left < 60) for box in boxes] == [(True, True), (True, False), (False, True)]
    assert all(box.top < top and box.bottom > top + 20 for box, top in zip(boxes, (14, 12, 56), strict=True))


def test_regions_that_touch_are_one(example: Any) -> None:
    rows = ["##.#.#", ".#.#.#", "##.###", "......", "#.#..#"]
    labels, count = example("read_text").label(np.array([[letter == "#" for letter in row] for row in rows]))
    assert count == 5
    assert [labels[0, 0], labels[0, 3]] == [labels[2, 0], labels[0, 5]]
    assert len({*labels.reshape(-1)} - {0}) == 5
    assert not labels[3].any()


def test_a_picture_is_classified_with_the_labels_of_the_file(
    drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = drawn("classify_image")
    network = save(
        tmp_path / "net.onnx",
        [helper.make_node("GlobalAveragePool", ["x"], ["p"]), helper.make_node("Flatten", ["p"], ["y"])],
        {"x": (None, 3, 224, 224)}, ["y"], {}, character="red\ngreen\nblue",
    )  # fmt: skip
    run(module, monkeypatch, "page.png", "--network", network, "--top", 2)
    first, second = capsys.readouterr().out.splitlines()
    assert [first.split()[1], second.split()[1]] == ["blue", "green"]
    assert 0 < float(second.split()[0]) < float(first.split()[0]) < 1


def test_loud_parts_of_a_recording_are_speech(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [
        helper.make_node("Abs", ["input"], ["a"]),
        helper.make_node("ReduceMax", ["a"], ["output"], axes=[1]),
        helper.make_node("Add", ["state", "one"], ["stateN"]),
    ]
    inputs = {"input": (None, None), "state": (2, None, 128), "sr": np.zeros((), np.int64)}
    network = save(tmp_path / "net.onnx", nodes, inputs, ["output", "stateN"], {"one": np.float32(1)})
    samples = np.zeros(2 * 32000, np.int16)  # 2 s
    samples[32000:48000] = 30000
    with wave.open(str(tmp_path / "sound.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(32000)
        sound.writeframes(samples.tobytes())
    module = example("find_speech")
    run(module, monkeypatch, tmp_path / "sound.wav", "--network", network)
    assert capsys.readouterr().out == "1.0 s to 1.5 s\n"
    assert module.parts(iter([0.9] * 9 + [0.4] * 9 + [0.1] * 4 + [0.6] + [0.1] * 9 + [0.6] * 3)) == [(0, 23 * 0.032)]


def test_files_are_named_by_their_bytes(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("name_files")
    config = {"block_size": 16, "padding_token": 256, "beg_size": 4, "end_size": 3, "target_labels_space": ["a", "b"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    nodes = [
        helper.make_node("Cast", ["bytes"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Gemm", ["f", "w"], ["y"]),
    ]
    weights = np.zeros((7, 2), np.float32)
    weights[0] = [1, 0]  # the score of "a" is the first byte, that of "b" the last
    weights[6] = [0, 1]
    network = save(tmp_path / "net.onnx", nodes, {"bytes": np.zeros((1, 7), np.int32)}, ["y"], {"w": weights})
    assert module.features(b"  xyz\n", config).tolist() == [*b"xyz\n", *b"xyz"]
    assert module.features(b"q", config).tolist() == [*b"q", *[256] * 5, *b"q"]
    (tmp_path / "one").write_bytes(b" za")
    run(module, monkeypatch, tmp_path / "one", "--network", network, "--config", tmp_path / "config.json")
    assert capsys.readouterr().out.split()[1] == "a"
