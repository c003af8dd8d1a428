"""Python stages in their processes: correct results alone and in batches; every failure is contained and named."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from penstock.api_errors import FieldError, RefusalError
from penstock.errors import DeadlineError
from tests.support.errors import raises
from tests.support.servable_folders import Host, request, write

NUMBERS = """
    servable.settings(workers=2, timeout_s=600)

    @servable.stage(outputs={"sum": "FP32[3]", "difference": "FP32[3]"}, batch_size=8)
    def add_and_subtract(x, y):
        return x + y, x - y

    @servable.stage(outputs={"y": "FP32[3]"})
    def double(x):
        x *= 2
        return x

    @servable.stage(outputs={"norm": "FP32[]", "size": "INT64[]"}, batch_size=5, padded_sizes=(2, 5))
    def norm(x):
        print("rows:", len(x))
        assert len(x) in (2, 5)
        return {"size": np.full(len(x), len(x)), "norm": np.sqrt((x * x).sum(1))}

    @servable.method(inputs={"x": "FP32[3]", "y": "FP32[3]"},
                     outputs={"norm": "FP32[]", "sum": "FP32[3]", "x": "FP32[3]", "size": "INT64[]"})
    def all_of_it(x, y):
        total, difference = add_and_subtract(double(x), y)
        found = norm(difference)
        return {"norm": found["norm"], "sum": total, "x": x, "size": found["size"]}

    @servable.stage(outputs={"upper": "TEXT[]", "words": "TEXT[-1]", "number": "INT32[]"})
    def take_apart(text):
        assert isinstance(text, str)
        return text.upper(), text.split() or ["-"], len(text)

    @servable.stage(outputs={"joined": "BYTES[]"}, batch_size=4)
    def put_together(words, upper):
        return np.array([" ".join(row).encode() + b"/" + one.encode() for row, one in zip(words, upper)], object)

    @servable.method(inputs={"text": "TEXT[]"}, outputs={"joined": "BYTES[]", "words": "TEXT[-1]", "number": "INT32[]"})
    def text(text):
        upper, words, number = take_apart(text)
        return put_together(words, upper), words, number

    @servable.stage(outputs={"y": "FP32[-1]"}, batch_size=16)
    def halve(x):
        return x / 2

    @servable.method(inputs={"x": "FP32[-1]"}, outputs={"y": "FP32[-1]"})
    def any_size(x):
        return halve(x)
"""

FAULTS = """
    servable.settings(timeout_s=600)

    @servable.stage(outputs={"y": "FP32[]"})
    def each(x):
        if x == 1: raise servable.InputError("one is not taken")
        if x == 2: raise ValueError("a secret")
        if x == 3: return np.zeros(2)
        if x == 4: return "four"
        if x == 5: return None
        if x == 6: os._exit(7)
        if x == 7: ctypes.string_at(0)
        if x == 8: sys.exit(3)
        if x == 9: raise KeyboardInterrupt
        return x

    @servable.stage(outputs={"y": "FP32[]"}, batch_size=16)
    def whole(x):
        bad = set(x.tolist())
        if 1 in bad: raise servable.InputError("one is not taken", instance=x.tolist().index(1))
        if 2 in bad: raise ValueError("a secret")
        if 3 in bad: return x[1:]
        if 4 in bad: return x.astype(str)
        if 5 in bad: return x, x
        if 6 in bad: os._exit(7)
        if 7 in bad: ctypes.string_at(0)
        if 8 in bad: sys.exit(3)
        if 9 in bad: raise KeyboardInterrupt
        return x

    @servable.method(inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"})
    def one_by_one(x):
        return each(x)

    @servable.method(inputs={"x": "FP32[]"}, outputs={"y": "FP32[]"})
    def together(x):
        return whole(x)
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    root = tmp_path_factory.mktemp("servables")
    write(root, "numbers", NUMBERS)
    write(root, "faults", FAULTS)
    found = Host(root)
    yield found
    found.close()


def rows(seed: int, count: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=(count, 3)).astype(np.float32) for name in "xy"}


def same(a, b) -> None:
    assert set(a) == set(b)
    for name in a:
        assert np.array_equal(a[name], b[name]), name


def test_results_match_the_functions(host: Host) -> None:
    given = rows(1, 7)
    found = host.ask("numbers.all_of_it", **given)
    difference = given["x"] * 2 - given["y"]
    assert np.array_equal(found["sum"], given["x"] * 2 + given["y"])
    assert np.array_equal(found["norm"], np.sqrt((difference * difference).sum(1)))
    assert np.array_equal(found["x"], given["x"]), "a stage that changes its argument changes nobody else's"
    assert found["size"].tolist() == [5, 5, 5, 5, 5, 2, 2]


def test_batch_matches_single(host: Host) -> None:
    """Bit for bit: many requests at once, and each alone."""
    several = [rows(seed, 1 + seed % 4) for seed in range(30)]
    for given, found in zip(several, host.gather("numbers.all_of_it", *several), strict=True):
        alone = host.ask("numbers.all_of_it", **given)
        for name in ("sum", "norm", "x"):
            assert np.array_equal(found[name], alone[name])


def test_split_matches_single(host: Host) -> None:
    """The results of a request in many batches are those of its instances."""
    given = rows(3, 41)
    found = host.ask("numbers.all_of_it", **given)
    for index in range(41):
        alone = host.ask("numbers.all_of_it", **{name: one[index : index + 1] for name, one in given.items()})
        for name in ("sum", "norm", "x"):
            assert np.array_equal(found[name][index], alone[name][0])


def test_padded_matches_single(host: Host) -> None:
    """Batches of 1 are padded to 2, of 3 to 5: the padding is in no answer."""
    given = rows(4, 3)
    found = host.ask("numbers.all_of_it", **given)
    assert found["size"].tolist() == [5, 5, 5]
    for index in range(3):
        alone = host.ask("numbers.all_of_it", **{name: one[index : index + 1] for name, one in given.items()})
        assert alone["size"].tolist() == [2]
        assert np.array_equal(found["norm"][index], alone["norm"][0])


def test_texts_and_bytes(host: Host) -> None:
    found = host.ask("numbers.text", text=["grün ja", "a b"])
    assert found["joined"].tolist() == ["grün ja/GRÜN JA".encode(), b"a b/A B"]
    assert found["words"].tolist() == [["grün".encode(), b"ja"], [b"a", b"b"]]
    assert found["number"].tolist() == [7, 3]


def test_other_sizes_share_processes_but_no_batch(host: Host) -> None:
    several = [{"text": ["one"]}, {"text": ["one two"]}, {"text": ["1 2 3"]}, {"text": ["x y"]}]
    found = host.gather("numbers.text", *several)
    assert [one["words"].shape for one in found] == [(1, 1), (1, 2), (1, 3), (1, 2)]
    several = [{"x": np.full((2, size), size, np.float32)} for size in (1, 2, 3, 2, 1)]
    for given, answer in zip(several, host.gather("numbers.any_size", *several), strict=True):
        assert np.array_equal(answer["y"], given["x"] / 2)


def test_instances_of_different_shapes_are_refused(host: Host) -> None:
    with raises(RefusalError, code="invalid_input", match="different shapes") as caught:
        host.ask("numbers.text", text=["one", "one two"])
    assert caught.value.status == 400


def test_invalid_inputs_are_refused_by_name(host: Host) -> None:
    good = rows(1, 2)
    wrong = {
        "y": ({"x": good["x"]}, "missing"),
        "z": (good | {"z": good["x"]}, "unknown input"),
        "x": (good | {"x": good["x"].astype(np.int64)}, "FP32, got INT64"),
    }
    for path, (given, fact) in wrong.items():
        with raises(FieldError, param=path, match=fact) as caught:
            host.ask("numbers.all_of_it", **given)
        assert caught.value.param == path
    for shape in ((2, 4), (2, 3, 1), (3,), (0, 3), (1, 3)):
        with pytest.raises(FieldError):
            host.ask("numbers.all_of_it", **(good | {"y": np.zeros(shape, np.float32)}))
    with raises(FieldError, param="text", match="UTF-8"):
        host.ask("numbers.text", text=[b"\xff"])
    method = host.servables.find("numbers.any_size")
    with raises(FieldError, param="z"):
        host.do(method.infer(request({"x": np.zeros((1, 2))}, outputs=["z"])))
    with pytest.raises(DeadlineError):
        host.do(method.infer(request({"x": np.zeros((1, 2))}, deadline_s=0.0)))


ENDS = {1: (400, "invalid_input"), 2: (500, "stage_failed"), 3: (500, "stage_failed"), 4: (500, "stage_failed"),
        5: (500, "stage_failed"), 6: (500, "stage_died"), 7: (500, "stage_died"), 8: (500, "stage_died"),
        9: (500, "stage_died")}  # fmt: skip


@pytest.mark.parametrize("name", ["one_by_one", "together"])
def test_failure_affects_only_its_request(host: Host, name: str) -> None:
    """Others in the batch are answered; the error names the stage, and contains no secret."""
    stage = "each" if name == "one_by_one" else "whole"
    for wrong, (status, code) in ENDS.items():
        several = [{"x": np.array([20.0 + one, 30.0])} for one in range(12)]
        several[5] = {"x": np.array([11.0, wrong])}
        found = host.gather(f"faults.{name}", *several)
        refused = found.pop(5)
        assert isinstance(refused, RefusalError), refused
        assert (refused.status, refused.code) == (status, code), wrong
        assert stage in str(refused)
        assert "secret" not in str(refused)
        if name == "one_by_one" or wrong == 1:
            assert "instance 1" in str(refused)
        del several[5]
        for given, answer in zip(several, found, strict=True):
            assert np.array_equal(answer["y"], given["x"].astype(np.float32))
    statistics = host.servables.find(f"faults.{name}").statistics
    assert statistics.num_fail >= len(ENDS)
    assert statistics.num_success >= 11 * len(ENDS)


def test_failed_batch_is_not_counted(host: Host) -> None:
    statistics = host.servables.find("faults.one_by_one").statistics
    before = statistics.num_executions
    with pytest.raises(RefusalError):
        host.ask("faults.one_by_one", x=np.array([1.0]))
    assert statistics.num_executions == before
    assert 0 not in statistics.batch_sizes
    host.ask("faults.one_by_one", x=np.array([20.0, 30.0]))
    assert statistics.num_executions > before


def test_bits_of_batches_of_one_request_fail_together(host: Host) -> None:
    """The 30th of 40 instances fails: the whole request is refused, and the error names the instance."""
    given = np.arange(20.0, 60.0)
    given[30] = 1
    with pytest.raises(RefusalError, match=r"^each, instance 30:"):
        host.ask("faults.one_by_one", x=given)
    with pytest.raises(RefusalError, match=r"^whole, instance 30:"):
        host.ask("faults.together", x=given)
