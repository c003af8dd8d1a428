"""``penstock.lite.Model``: rows are the engine's own, bit for bit, however sequences are cut into calls."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import lite
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.graph.replace_tail import replace_tail
from penstock.llm.llm import LLM
from tests.support.errors import raises
from tests.support.lite_demo import BUNDLE, IDS, ROOT, VOCAB, ask, build, tensors
from tests.support.properties import CHECKS


@pytest.fixture(scope="module")
def rows() -> npt.NDArray[np.float32]:
    """The engine's logits of each position of IDS."""
    with LLM(BUNDLE) as llm:
        return llm.logits(IDS).copy()


def test_the_program_of_the_document_runs() -> None:
    """Its lines, with the import, the type of the file and the target changed, and as many numbers as it prints."""
    document = """
context = mslite.Context()
context.target = ["cpu"]
context.gpu.device_id = context.gpu.rank_id
model = mslite.Model()
model.build_from_file(model_path, mslite.ModelType.PENSTOCK, context, config_file)
inputs = model.get_inputs()
for input_i in inputs:
    input_i.set_data_from_numpy(np.ones(input_i.shape, dtype=np.float32))
outputs = model.predict(inputs)
for output in outputs:
    name = output.name.rstrip()
    data_size = output.data_size
    element_num = output.element_num
    print("tensor's name is:%s data size is:%s tensor elements num is:%s" %
          (name, data_size, element_num))
    data = output.get_data_to_numpy()
    data = data.flatten()
    print("output data is:", end=" ")
    for i in range(10):
        print(data[i], end=" ")
    print("")
"""
    head = (
        'import sys; sys.modules["torch"] = None\nimport numpy as np\nimport penstock.lite as mslite\n'
        f'model_path, config_file = {str(BUNDLE)!r}, ""\n'
    )
    done = subprocess.run([sys.executable, "-c", head + document], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == f"tensor's name is:logits data size is:{4 * VOCAB} tensor elements num is:{VOCAB}"
    with LLM(BUNDLE) as llm:
        expected = llm.logits([1])[0]
    assert second.split() == ["output", "data", "is:", *(str(value) for value in expected[:10])]


def test_a_sequence_at_once_and_token_by_token(rows: npt.NDArray[np.float32]) -> None:
    with build() as model:
        assert np.array_equal(ask(model, [IDS])[0], rows[-1])
        for index, token in enumerate(IDS):
            assert np.array_equal(ask(model, [[token]], int(index == 0))[0], rows[index])


def test_all_rows_and_steps_smaller_than_the_call(rows: npt.NDArray[np.float32]) -> None:
    with build(logits="all", max_tokens=3, batch_size=2) as model:
        found = ask(model, [IDS, IDS[:5]])
        assert found.shape == (2, len(IDS), VOCAB)
        assert np.array_equal(found[0], rows)
        assert np.array_equal(found[1, :5], rows[:5])
        assert not found[1, 5:].any()  # padding


def test_sequences_go_on_begin_anew_and_sit_out(rows: npt.NDArray[np.float32]) -> None:
    with build(batch_size=3, max_tokens=4) as model:
        first = ask(model, [IDS[:2], IDS[:7], IDS[:4]])
        assert np.array_equal(first, rows[[1, 6, 3]])
        second = ask(model, [IDS[2:5], IDS[:1], []], [0, 1, 0])
        assert np.array_equal(second[:2], rows[[4, 0]])
        assert not second[2].any()
        third = ask(model, [IDS[5:6], IDS[1:3], IDS[4:]], 0)
        assert np.array_equal(third, rows[[5, 2, 10]])


def test_another_batch_size_empties_sequences(rows: npt.NDArray[np.float32]) -> None:
    with build() as model:
        ask(model, [IDS[:3]])
        found = ask(model, [IDS[:2], IDS[:3]], 0)
        assert np.array_equal(found, rows[[1, 2]])


def test_a_failed_call_does_not_change_the_model(rows: npt.NDArray[np.float32]) -> None:
    with build(context_len=12) as model:
        ask(model, [IDS[:8]])
        with raises(InvalidArgumentError, param="num_tokens", match="4 for sequence 0"):
            ask(model, [[1] * 5], 0)
        assert np.array_equal(ask(model, [IDS[8:]], 0)[0], rows[-1])


def test_outputs_are_filled_and_names_beat_order(rows: npt.NDArray[np.float32]) -> None:
    with build(seq_len=len(IDS)) as model:
        inputs = model.get_inputs()
        inputs[0].set_data_from_numpy(np.array([IDS]))
        (wanted,) = model.get_outputs()
        assert model.predict(inputs[::-1], [wanted])[0] is wanted
        assert np.array_equal(wanted.get_data_to_numpy()[0], rows[-1])


@pytest.mark.parametrize(("tail", "width"), [("argmax", 1), ("topk:5", 5)])
def test_a_bundle_that_ends_in_ids(tail: str, width: int, rows: npt.NDArray[np.float32], tmp_path: Path) -> None:
    replace_tail(BUNDLE, tmp_path / "tail.psm", tail)
    with build(tmp_path / "tail.psm") as model:
        assert model.get_model_info("tail") == tail.partition(":")[0]
        given = tensors([IDS])
        model.resize(given, [one.shape for one in given])
        ids, *values = model.predict(given)
        best = np.argsort(-rows[-1], kind="stable")[:width]
        assert np.array_equal(ids.get_data_to_numpy(), best[None])
        assert all(np.array_equal(value.get_data_to_numpy(), rows[-1][best][None]) for value in values)
        assert len(values) == (tail != "argmax")


def test_model_info_and_files() -> None:
    with build(context_len=64, kv_cache="int8") as model:
        info = model.get_model_info()
        assert (info["network"], info["scheme"], info["vocab_size"], info["context_len"]) == (
            "llama",
            "w8a8",
            VOCAB,
            64,
        )
        assert 0 < info["planned_bytes"] < 4_000_000
        assert model.get_model_info("max_context_len") == 1024
        assert (model.get_file("tokenizer.json") or b"").startswith(b"{")
        assert model.get_file("no such") is None
        for name in (3, "config.json\0"):
            with raises(InvalidArgumentError, param="name"):
                model.get_file(name)  # type: ignore[arg-type]
        with raises(InvalidArgumentError, match=r"'vocab'; .*vocab_size"):
            model.get_model_info("vocab")


def test_threads_take_turns(rows: npt.NDArray[np.float32]) -> None:
    with build(seq_len=len(IDS)) as model:
        inputs = model.get_inputs()
        inputs[0].set_data_from_numpy(np.array([IDS]))
        found: list[npt.NDArray[np.float32]] = []

        def work() -> None:
            for _ in range(5):
                found.append(model.predict(inputs)[0].get_data_to_numpy()[0])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 20
        assert all(np.array_equal(row, rows[-1]) for row in found)


def test_config_files(tmp_path: Path) -> None:
    file = tmp_path / "config.ini"
    file.write_text("[model]\nbatch_size = 2\nlogits = all\nverify = true\n")
    with build() as other:
        other.build_from_file(BUNDLE, lite.ModelType.PENSTOCK, None, file)
        assert [one.shape for one in other.get_inputs()] == [[2, 1], [2], [2]]
        assert other.get_outputs()[0].shape == [2, 1, VOCAB]
        for text, words in (
            ("[ascend]\nprovider=ge\n", r"\[ascend\]"),
            ("[model]\nbatch = 2\n", "got 'batch'"),
            ("[model]\nbatch_size = two\n", "batch_size: .*integer"),
            ("[model]\nthreads = 2\nThreads = 3\n", r"\[model\] threads"),
            ("batch_size = 2\n", "line 1"),
        ):
            file.write_text(text)
            with pytest.raises(InvalidFileError, match=words):
                other.build_from_file(BUNDLE, lite.ModelType.PENSTOCK, None, file)
        assert other.get_outputs()[0].shape == [2, 1, VOCAB]  # as it was


def test_huge_weights_compute_the_same(rows: npt.NDArray[np.float32]) -> None:
    with build(weights="huge") as model:
        assert np.array_equal(ask(model, [IDS])[0], rows[-1])
        assert model.get_model_info("weights") == "huge"


@pytest.mark.parametrize(
    ("config", "field", "words"),
    [
        ({"batch_size": 0}, "batch_size", ".* from 1 "),
        ({"context_len": 2000}, "context_len", ".*1024"),
        ({"seq_len": 2000}, "seq_len", ".*context's 1024"),
        ({"kv_cache": "f8"}, "kv_cache", ".*auto, f32, bf16, int8, int4"),
        ({"logits": "first"}, "logits", ".*last, all"),
        ({"device": 0}, "config", ".*got 'device'"),
    ],
)
def test_configs_that_are_refused(config: dict[str, object], field: str, words: str) -> None:
    with raises(InvalidArgumentError, param=field, match=words):
        build(**config)


def test_files_that_are_not_bundles_are_refused() -> None:
    model = lite.Model()
    with raises(InvalidFileError, param="header.magic"):
        model.build_from_file(ROOT / "demo" / "model" / "model.safetensors", lite.ModelType.PENSTOCK)
    with raises(InvalidArgumentError, param="model_type", match="'mindir'"):
        model.build_from_file(BUNDLE, "mindir")  # type: ignore[arg-type]
    with raises(InvalidArgumentError, match="build_from_file"):
        model.get_inputs()
    with raises(UnsupportedError, param="precision_mode", match="w4a8 .*got w8a8"):
        build(context=lite.Context(precision_mode="w4a8"))
    with raises(UnsupportedError, param="precision_mode", match="enforce_fp32 .* f32"):
        build(context=lite.Context(precision_mode="enforce_fp32"))


@settings(CHECKS, max_examples=25)
@given(data=st.data())
def test_any_cuts_of_any_sequences(rows: npt.NDArray[np.float32], data: st.DataObject) -> None:
    """Three sequences get some of IDS, or begin anew, or sit out, in steps of any size: rows are as of one alone."""
    with build(batch_size=3, max_tokens=data.draw(st.integers(1, 9))) as model:
        lens = [0, 0, 0]
        for _ in range(data.draw(st.integers(1, 6))):
            resets = data.draw(st.lists(st.integers(0, 1), min_size=3, max_size=3))
            begins = [0 if reset else length for reset, length in zip(resets, lens, strict=True)]
            counts = [data.draw(st.integers(0, len(IDS) - begin)) for begin in begins]
            if not any(counts):
                continue
            given_rows = [IDS[begin : begin + count] for begin, count in zip(begins, counts, strict=True)]
            found = ask(model, given_rows, resets)
            lens = [begin + count for begin, count in zip(begins, counts, strict=True)]
            for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
                assert np.array_equal(found[row], rows[length - 1] if count else np.zeros(VOCAB, np.float32))


def test_a_bundle_of_a_newer_minor_version_warns(tmp_path: Path) -> None:
    path = tmp_path / "newer.psm"
    data = bytearray(BUNDLE.read_bytes())
    data[10:12] = (9).to_bytes(2, "little")
    path.write_bytes(data)
    words = rf"{path}: header\.minor: the file has format 1\.9, this version reads 1\.1"
    with pytest.warns(UserWarning, match=words) as told:
        build(path).close()
    assert len(told) == 1
    with pytest.warns(UserWarning, match=words) as told:
        LLM(path).close()
    assert len(told) == 1
