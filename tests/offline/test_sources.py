"""The ways of saying what a pipeline runs: each finds its files, and says what is wrong with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock import InferConfig, InferTask, pipeline
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.graph.replace_tail import replace_tail
from tests.support.errors import raises
from tests.support.lite_demo import BUNDLE, FOLDER

PROMPT = "I love Beijing,because"


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with pipeline(model=BUNDLE) as generate:
        return generate(PROMPT, max_tokens=8, is_sample_acceleration=True).token_ids


def ids(generate: object) -> list[int]:
    with generate:  # type: ignore[attr-defined]
        return generate(PROMPT, max_tokens=8, is_sample_acceleration=True).token_ids  # type: ignore[operator]


def model_folder(path: Path, yaml: str = "infer:\n  infer_seq_length: 512\n", pair: bool = True) -> Path:
    path.mkdir()
    (path / "test.yaml").write_text(yaml)
    (path / "demo_prefill_graph.psm").symlink_to(BUNDLE)
    if pair:
        (path / "demo_inc_graph.psm").hardlink_to(
            path / "demo_prefill_graph.psm",
        )
    return path


def test_by_name(expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle, a YAML file as the document has it, a folder; of several folders the first that has one."""
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    monkeypatch.setenv("PENSTOCK_MODELS", f"{first}:{second}")
    shutil.copy(BUNDLE, second / "small.psm")
    assert ids(pipeline("text_generation", "small", backend="lite")) == expected
    (first / "run_bloom_560m.yaml").write_text(
        f"infer:\n    prefill_model_path: {second / 'small.psm'}\n    increment_model_path: {second / 'small.psm'}\n"
        "    infer_seq_length: 512\n    model_type: penstock\n"
    )
    with pipeline("text_generation", "bloom_560m", infer_seq_length=256) as generate:
        assert (generate.config.model_name, generate.config.infer_seq_length) == ("bloom_560m", 256)
    model_folder(first / "folder")
    assert ids(pipeline("text_generation", "folder")) == expected
    assert ids(InferTask.get_infer_task("text_generation", InferConfig(model_name="small"))) == expected
    elsewhere = pytest.raises(FileAccessError, match=r"'small': .*small\.psm, small\.yaml.*/a")
    with elsewhere:
        pipeline("text_generation", "small", search_path=first)
    shutil.copy(BUNDLE, second / "small")
    with raises(InvalidArgumentError, match=r"'small': .*/b .*small\.psm"):
        pipeline("text_generation", "small")
    monkeypatch.delenv("PENSTOCK_MODELS")
    with raises(FileAccessError, param="model", match="set PENSTOCK_MODELS"):
        pipeline("text_generation", "small")


def test_a_search_path_says_that_a_name_is_meant(
    expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "demo.psm").symlink_to(BUNDLE)
    monkeypatch.chdir(tmp_path)
    assert ids(pipeline("text_generation", "demo", search_path="demo")) == expected
    with raises(InvalidFileError, param="model", match="one YAML file"):
        pipeline("text_generation", "demo")


def test_by_path(expected: list[int], tmp_path: Path) -> None:
    for pair in ((BUNDLE, BUNDLE), (str(BUNDLE), str(shutil.copy(BUNDLE, tmp_path / "inc.psm")))):
        assert ids(pipeline("text_generation", pair, model_name="bloom", device_id=0, infer_seq_length=512)) == expected
    with raises(FileAccessError, match=r"none\.psm:"):
        pipeline("text_generation", "none.psm")
    with raises(FileAccessError, match="no/such:"):
        pipeline("text_generation", "no/such")


def test_a_pair_that_does_not_fit(bundles: dict[str, Path], tmp_path: Path) -> None:
    tail = tmp_path / "tail.psm"
    replace_tail(BUNDLE, tail, "argmax")
    changed = tmp_path / "changed.psm"
    for other, words in (
        (bundles["w4a8"], "scheme .*w4a8 .*w8a8"),
        (tail, "end of the graph .*argmax"),
    ):
        with raises(InvalidArgumentError, param="increment_model_path", match=words):
            pipeline("text_generation", (BUNDLE, other))
    from penstock.graph.export import export_bundle
    from tests.support.lite_demo import folder, values

    export_bundle(folder(tmp_path / "new", values(1.25)), changed, scheme="w8a8")
    with raises(InvalidArgumentError, param="increment_model_path", match="checksum of weights"):
        pipeline("text_generation", (BUNDLE, changed), backend="lite")
    with raises(InvalidArgumentError, param="model"):
        pipeline("text_generation", (BUNDLE, BUNDLE, BUNDLE))


def test_by_model_folder(expected: list[int], tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "one")
    (folder / "config.ini").write_text("[model]\nmax_tokens = 64\n")
    with pipeline("text_generation", folder, model_name="bloom_560m", device_id=0) as generate:
        config = generate.config
        assert config.increment_model_path.endswith("one/demo_inc_graph.psm")
        assert (config.infer_seq_length, config.config_path) == (512, str(folder / "config.ini"))
    assert ids(pipeline("text_generation", folder, backend="lite")) == expected
    (folder / "config.ini").write_text("[ge_session_option]\nge.externalWeight=1\n")
    with pytest.raises(InvalidFileError, match=r"got \[ge_session_option\]"):
        pipeline("text_generation", folder)
    assert ids(pipeline("text_generation", model_folder(tmp_path / "two", pair=False))) == expected


def spoil(folder: Path, what: str) -> None:
    if what == "two yaml":
        (folder / "other.yml").write_text("infer: {}\n")
    elif what == "no yaml":
        (folder / "test.yaml").unlink()
    elif what == "two prefill":
        (folder / "b_prefill_graph.psm").symlink_to(BUNDLE)
    elif what == "stray":
        (folder / "model.psm").symlink_to(BUNDLE)
    elif what == "no prefill":
        (folder / "demo_prefill_graph.psm").unlink()
    else:
        (folder / "test.yaml").write_text(what)


@pytest.mark.parametrize(
    ("what", "param", "fact"),
    [
        ("two yaml", "model", r"YAML .*got other\.yml, test\.yaml"),
        ("no yaml", "model", "YAML .*got none"),
        ("two prefill", "prefill_model_path", r"one .*\*_prefill_graph\.psm, got b_prefill_graph\.psm, demo_"),
        ("stray", "model", r"only .*got model\.psm"),
        ("no prefill", None, r"\*_prefill_graph\.psm, got none"),
        (
            f"infer:\n  prefill_model_path: {BUNDLE.parent / 'other.psm'}\n",
            "infer",
            "prefill_model_path: ",
        ),
        ("infer:\n  seq_length: 5\n", "seq_length", "infer_seq_length"),
        ("infer:\n  model_type: om\n", "model_type", "'om'"),
        ("infer:\n  device_id: 0\n  device_id: 1\n", "device_id", "line 3"),
        ("infer: [1, 2]\n", "infer", "mapping"),
        ("infre: {}\n", "infre", "did you mean infer"),
        ("- 1\n", "path", "mapping .*got list"),
        ("a: !!python/object/apply:os.getcwd []\n", "path", "constructor"),
        ("a: [" * 3000, "path", "test.yaml: "),
    ],
)
def test_model_folders_that_are_refused(what: str, param: str | None, fact: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    spoil(folder, what)
    with raises((InvalidFileError, UnsupportedError), param=param, match=fact):
        pipeline("text_generation", folder)


@pytest.mark.parametrize("backend", ["graph", "lite"])
def test_by_config(expected: list[int], backend: str, tmp_path: Path) -> None:
    file = tmp_path / "config.ini"
    file.write_text("[model]\nmax_tokens = 7\n")
    config = InferConfig(
        prefill_model_path=str(BUNDLE),
        increment_model_path=str(BUNDLE),
        model_type="penstock",
        model_name="bloom_560m",
        ge_config_path=str(file),
        device_id=0,
        infer_seq_length=512,
    )
    assert (config.config_path, config.ge_config_path) == (str(file), "")
    generate = InferTask.get_infer_task("text_generation", config, tokenizer=FOLDER, backend=backend)
    assert ids(generate) == expected
    assert ids(pipeline("text_generation", config, backend=backend)) == expected


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"model_type": "mindir"}, "'penstock'"),
        ({"target": "Ascend"}, "'Ascend'"),
        ({"target": "gpu"}, "'gpu'"),
        ({"device_id": 1}, "not 1"),
        ({"rank_id": 1}, "not 1"),
        ({"device_id": -1}, "got -1"),
        ({"infer_seq_length": "512"}, "'512'"),
        ({"model_name": ""}, "got ''"),
        ({"config_path": "a", "ge_config_path": "b"}, "ge_config_path"),
        ({"increment_model_path": "a"}, "prefill_model_path"),
        ({"prefill_model_path": 3}, "got 3"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, object], fact: str) -> None:
    with raises((InvalidArgumentError, UnsupportedError), param=next(iter(fields)), match=fact):
        InferConfig(**fields)  # type: ignore[arg-type]


def test_fields_that_are_set_later() -> None:
    """What does not exist cannot be, and what does is checked when a pipeline is made."""
    config = InferConfig(str(BUNDLE))
    with raises(InvalidArgumentError, match=r"'infer_seq_len'; .*infer_seq_length"):
        config.infer_seq_len = 4  # type: ignore[attr-defined]
    config.target = "Ascend"
    for make in (InferTask.get_infer_task, pipeline):
        with raises(InvalidArgumentError, param="target"):
            make("text_generation", config)
    config.target, config.infer_seq_length = "cpu", 16
    with pipeline("text_generation", config) as generate:
        assert len(generate([5] * 10, ignore_eos=True).token_ids) == 6


def test_a_checkpoint_folder(expected: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its bundle is made once, and serves both backends and the graph that chooses."""
    monkeypatch.setattr("penstock.runtime.cache.build_in_child", lambda *_, **__: pytest.fail("made again"))
    monkeypatch.setattr("penstock.runtime.cache.Cache.find_or_build", lambda *_: BUNDLE)
    for backend in ("graph", "lite"):
        assert ids(pipeline("text_generation", FOLDER, backend=backend, scheme="w8a8")) == expected
    file = tmp_path / "config.ini"
    file.write_text("[model]\nverify = true\n")
    with raises(UnsupportedError, param="verify"):
        pipeline("text_generation", FOLDER, backend="eager", config_path=file)
    with raises(InvalidFileError, param="model", match="expected a checkpoint folder"):
        pipeline("text_generation", BUNDLE.parents[1] / "docs")


def test_conflicting_arguments_are_refused(tmp_path: Path) -> None:
    with raises(InvalidArgumentError, param="model"):
        pipeline("text_generation")
    with raises(InvalidArgumentError, param="prefill_model_path", match=r"with model$"):
        pipeline("text_generation", BUNDLE, prefill_model_path=BUNDLE)
    with raises(InvalidArgumentError, param="device_id"):
        pipeline("text_generation", InferConfig(str(BUNDLE)), device_id=0)
    file = tmp_path / "config.ini"
    file.write_text("[model]\ncontext_len = 64\nlogits = all\n")
    with raises(InvalidArgumentError, param="logits", match=r"logits .*penstock\.lite\.Model"):
        pipeline("text_generation", BUNDLE, config_path=file)
    file.write_text("[model]\ncontext_len = 64\n")
    with raises(InvalidArgumentError, match=r"infer_seq_length .* 32, .* context_len 64"):
        pipeline("text_generation", BUNDLE, config_path=file, infer_seq_length=32)
    for backend in ("graph", "lite"):
        with raises(InvalidArgumentError, param="infer_seq_length", match="2000"):
            pipeline("text_generation", BUNDLE, backend=backend, infer_seq_length=2000)
        with raises(InvalidArgumentError, param="scheme", match="'w4a8'"):
            pipeline("text_generation", BUNDLE, backend=backend, scheme="w4a8")
        with raises(InvalidArgumentError, param="network", match="bundle"):
            pipeline("text_generation", BUNDLE, backend=backend, network="a.py:Net")
    with raises(InvalidArgumentError, param="search_path"):
        pipeline("text_generation", "a", search_path=3)
    for model in (BUNDLE, str(BUNDLE), FOLDER, (BUNDLE, BUNDLE), InferConfig(str(BUNDLE))):
        with raises(InvalidArgumentError, param="search_path"):
            pipeline("text_generation", model, search_path=tmp_path)
    with raises(InvalidArgumentError, param="search_path", match=r"demo\.psm"):
        pipeline("text_generation", prefill_model_path=BUNDLE, search_path=tmp_path)
