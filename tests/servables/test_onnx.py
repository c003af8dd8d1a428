"""Models in ONNX's format: compared with what is declared when they are loaded; alone, batched, split and padded alike.

Penstock runs all but the model of texts, which ONNX Runtime runs; answers agree within TOLERANCE of their size.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.api_errors import RefusalError
from penstock.errors import InvalidFileError
from tests.support.errors import raises
from tests.support.onnx_models import save
from tests.support.servable_folders import Host, pids, run, serving, write
from tests.support.worker_processes import until

TOLERANCE = 1e-5
RANDOM = np.random.default_rng(7)
FIRST, SECOND = (RANDOM.normal(size=shape).astype(np.float32) for shape in ((64, 33), (33, 10)))


def mlp(path: Path, batch: int | str = "batch") -> None:
    """Two layers from 64 to 10."""
    nodes = [
        helper.make_node("MatMul", ["image", "first"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["kept"]),
        helper.make_node("MatMul", ["kept", "second"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes, "mlp", [helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 64])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, 10])],
        [numpy_helper.from_array(FIRST, "first"), numpy_helper.from_array(SECOND, "second")],
    )  # fmt: skip
    save(graph, path)


def odd(path: Path) -> None:
    """Texts as they are, and a row of numbers twice: sizes that are not known, and text."""
    nodes = [
        helper.make_node("Identity", ["text"], ["same"]),
        helper.make_node("Concat", ["row", "row"], ["twice"], axis=1),
        helper.make_node("Gather", ["table", "row"], ["looked"], axis=0),
    ]
    graph = helper.make_graph(
        nodes, "odd",
        [helper.make_tensor_value_info("text", TensorProto.STRING, ["n"]),
         helper.make_tensor_value_info("row", TensorProto.INT64, ["n", "m"])],
        [helper.make_tensor_value_info("same", TensorProto.STRING, ["n"]),
         helper.make_tensor_value_info("twice", TensorProto.INT64, ["n", "k"]),
         helper.make_tensor_value_info("looked", TensorProto.INT64, ["n", "m"])],
        [numpy_helper.from_array(np.arange(5) * 10, "table")],
    )  # fmt: skip
    save(graph, path)


DIGITS = """
    digits = servable.model("digits.onnx", inputs={"image": "FP32[64]"}, outputs={"scores": "FP32[10]"},
                            batch_size=8, instances=2)
    padded = servable.model("four.onnx", inputs={"image": "FP32[64]"}, outputs={"scores": "FP32[10]"},
                            batch_size=4, padded_sizes=(4,))
    odd = servable.model("odd.onnx", inputs={"text": "TEXT[]", "row": "INT64[-1]"},
                         outputs={"same": "TEXT[]", "twice": "INT64[-1]", "looked": "INT64[-1]"}, batch_size=4)

    @servable.stage(outputs={"image": "FP32[64]"}, batch_size=8)
    def normalize(image):
        return image / 16

    @servable.stage(outputs={"label": "INT64[]"})
    def best(scores):
        return scores.argmax()

    @servable.method(inputs={"image": "FP32[64]"}, outputs={"label": "INT64[]", "scores": "FP32[10]"})
    def classify(image):
        scores = digits(normalize(image))
        return best(scores), scores

    @servable.method(inputs={"image": "FP32[64]"}, outputs={"scores": "FP32[10]"})
    def in_fours(image):
        return padded(normalize(image))

    @servable.stage(outputs={"again": "FP32[64]"}, batch_size=4)
    def back(scores, image):
        return np.tile(scores, (1, 7))[:, :64] - image

    @servable.method(inputs={"image": "FP32[64]"}, outputs={"first": "FP32[10]", "scores": "FP32[10]"})
    def in_a_row(image):
        first = digits(image)
        return first, padded(back(first, image))

    @servable.method(inputs={"text": "TEXT[]", "row": "INT64[-1]"},
                     outputs={"same": "TEXT[]", "twice": "INT64[-1]", "looked": "INT64[-1]"})
    def strange(text, row):
        return odd(text, row)
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    root = tmp_path_factory.mktemp("models")
    folder = write(root, "digits", DIGITS)
    mlp(folder / "1" / "digits.onnx")
    mlp(folder / "1" / "four.onnx", 4)
    odd(folder / "1" / "odd.onnx")
    found = Host(root)
    yield found
    found.close()


def images(count: int) -> np.ndarray:
    return np.random.default_rng(count).uniform(0, 16, (count, 64)).astype(np.float32)


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["classify", "in_fours"])
def test_batch_split_and_padded_match_single(host: Host, name: str) -> None:
    """Each image alone, all in one request that is split, and one by one at the same time; and what numpy says."""
    given = images(21)
    split = host.ask(f"digits.{name}", image=given)
    wanted = np.maximum(given / 16 @ FIRST, 0) @ SECOND
    close(split["scores"], wanted)
    together = host.gather(f"digits.{name}", *({"image": one[None]} for one in given))
    for index, one in enumerate(given):
        alone = host.ask(f"digits.{name}", image=one[None])
        close(together[index]["scores"], alone["scores"])
        close(split["scores"][index], alone["scores"][0])
        if "label" in split:
            assert split["label"][index] == wanted[index].argmax() == alone["label"][0]


def test_two_models_and_a_stage_between(host: Host) -> None:
    """What the second model gives is what numpy says of the first one's answer, whatever shares its batches."""
    given = images(21)
    first = np.maximum(given @ FIRST, 0) @ SECOND
    scores = np.maximum((np.tile(first, (1, 7))[:, :64] - given) @ FIRST, 0) @ SECOND
    whole = host.ask("digits.in_a_row", image=given)
    close(whole["first"], first)
    close(whole["scores"], scores)
    for index, one in enumerate(host.gather("digits.in_a_row", *({"image": one[None]} for one in given))):
        close(one["first"][0], first[index])
        close(one["scores"][0], scores[index])


def test_batches_are_counted_of_the_model(host: Host) -> None:
    statistics = host.servables.find("digits.classify").statistics
    before = statistics.num_executions
    host.ask("digits.classify", image=images(16))
    assert statistics.num_executions == before + 2
    assert statistics.batch_sizes[8][0] >= 2


def test_running_configuration_is_reported(host: Host) -> None:
    running = host.servables.find("digits.in_fours").running
    assert (running.policy, running.max_delay_s, running.max_waiting) == ({"latest": {"num_versions": 1}}, 0, 4096)
    assert (running.batch_sizes, running.processes["digits 1: four.onnx"]) == ((4,), 1)


def test_texts_and_unknown_sizes(host: Host) -> None:
    found = host.ask("digits.strange", text=["grün", ""], row=np.array([[1, 2, 3], [4, 0, 1]]))
    assert found["same"].tolist() == ["grün".encode(), b""]
    assert found["twice"].tolist() == [[1, 2, 3, 1, 2, 3], [4, 0, 1, 4, 0, 1]]
    assert found["looked"].tolist() == [[10, 20, 30], [40, 0, 10]]


def test_failing_model_fails_only_the_request_at_fault(host: Host) -> None:
    """An index beyond the table: others of the batch are answered."""
    several = [{"text": ["x"], "row": np.array([[n, n]])} for n in (1, 99, 2, 3)]
    found = host.gather("digits.strange", *several)
    refused = found.pop(1)
    assert isinstance(refused, RefusalError)
    assert (refused.status, refused.code) == (500, "stage_failed")
    assert "odd.onnx" in str(refused)
    assert [one["looked"].tolist() for one in found] == [[[10, 10]], [[20, 20]], [[30, 30]]]


def test_model_process_that_dies_is_restarted(host: Host) -> None:
    before = pids(host.servables)
    os.kill(before[-1], signal.SIGKILL)

    async def again() -> None:
        await until(lambda: before[-1] not in pids(host.servables) and len(pids(host.servables)) == len(before))

    host.do(again())
    assert host.ask("digits.strange", text=["x"], row=np.array([[1]]))["looked"].tolist() == [[10]]


WRONG = {
    "a name": ('inputs={"picture": "FP32[64]"}, outputs={"scores": "FP32[10]"}', "inputs are image, not picture"),
    "a datatype": ('inputs={"image": "FP64[64]"}, outputs={"scores": "FP32[10]"}', "input image is FP32, not FP64"),
    "a size": ('inputs={"image": "FP32[64]"}, outputs={"scores": "FP32[11]"}', "output scores has the shape"),
    "a rank": ('inputs={"image": "FP32[8,8]"}, outputs={"scores": "FP32[10]"}', "input image has the shape"),
    "an output": ('inputs={"image": "FP32[64]"}, outputs={"labels": "FP32[10]"}', "outputs are scores, not labels"),
    "a batch": ('inputs={"image": "FP32[64]"}, outputs={"scores": "FP32[10]"}, batch_size=5', "only batches of 4"),
}


def test_each_process_of_a_model_has_its_cores(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    own = [(allowed[0],), tuple(allowed[-2:])]
    for name, instances in (("pinned", own), ("beyond", [(allowed[-1] + 1,)])):
        folder = write(
            tmp_path / name,
            name,
            f"""
    digits = servable.model("digits.onnx", inputs={{"image": "FP32[64]"}}, outputs={{"scores": "FP32[10]"}},
                            instances={instances})

    @servable.method(inputs={{"image": "FP32[64]"}}, outputs={{"scores": "FP32[10]"}})
    def classify(image):
        return digits(image)
""",
        )
        mlp(folder / "1" / "digits.onnx")

    async def main() -> None:
        async with serving(tmp_path / "pinned") as servables:
            found = {pid: tuple(sorted(os.sched_getaffinity(pid))) for pid in pids(servables)}
            assert sorted(found.values()) == sorted(own)
            victim = next(pid for pid, cores in found.items() if cores == own[0])
            os.kill(victim, signal.SIGKILL)
            await until(lambda: victim not in pids(servables) and len(pids(servables)) == 2)
            assert sorted(tuple(sorted(os.sched_getaffinity(pid))) for pid in pids(servables)) == sorted(own)
        with raises(InvalidFileError, match="instances: "):
            async with serving(tmp_path / "beyond"):
                pass

    run(main)


@pytest.mark.parametrize("name", WRONG)
def test_model_that_differs_from_declaration_is_refused(tmp_path: Path, name: str) -> None:
    declared, told = WRONG[name]
    text = f"m = servable.model('m.onnx', {declared})\nimport json\n"
    text += "specs = [{n: str(s) for n, s in one.items()} for one in (m.inputs, m.outputs)]\n"
    names = declared.split('"')[1]
    text += f"@servable.method(inputs=specs[0], outputs=specs[1])\ndef called({names}): return m({names})\n"
    folder = write(tmp_path, "one", text)
    mlp(folder / "1" / "m.onnx", 4 if name == "a batch" else "n")

    async def work() -> None:
        with pytest.raises(InvalidFileError, match=told):
            async with serving(tmp_path):
                pass

    run(work)


def test_invalid_model_file_is_refused(tmp_path: Path) -> None:
    text = """
        m = servable.model("m.onnx", inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"})
        @servable.method(inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"})
        def called(x):
            return m(x)
    """
    folder = write(tmp_path, "one", text)
    (folder / "1" / "m.onnx").write_bytes(b"no model")

    async def work() -> None:
        with raises(InvalidFileError, match=r"m\.onnx: "):
            async with serving(tmp_path):
                pass
        (folder / "1" / "m.onnx").unlink()
        (folder / "1" / "m.onnx").symlink_to("/etc/passwd")
        with raises(InvalidFileError, param="path", match="leads out of"):
            async with serving(tmp_path):
                pass

    run(work)
