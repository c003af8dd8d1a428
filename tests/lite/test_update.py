"""``update_weights`` computes what a bundle of the new checkpoint would, byte for byte, and the file stays as it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from penstock import lite
from penstock.core.native import Model as CoreModel
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.graph.export import export_bundle
from penstock.lite.update import pack_updates
from tests.support.errors import raises
from tests.support.lite_demo import BUNDLE, CHANGED, IDS, LAYER, ask, build, folder, values
from tests.support.marks import mostly_long


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("update")
    return folder(base / "old", values()), folder(base / "new", values(1.25))


def named(weights: dict[str, npt.NDArray[np.float32]]) -> list[lite.Tensor]:
    return [lite.Tensor(np.ascontiguousarray(weights[name]), name=name) for name in CHANGED]


@pytest.mark.long
@pytest.mark.parametrize("scheme", mostly_long(["f32", "w8a8", "w4a8", "w4a8_h32"], "w4a8_h32"))
def test_as_a_bundle_of_the_new_checkpoint(scheme: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = (tmp_path / f"{one.name}.psm" for one in folders)
    for source, out in zip(folders, (old, new), strict=True):
        export_bundle(source, out, scheme=scheme)
    before = old.read_bytes()
    with build(new) as other:
        expected = ask(other, [IDS])
    with build(old) as model:
        first = ask(model, [IDS])
        model.update_weights(named(values(1.5)))  # from the file to a private copy
        model.update_weights([named(values(1.25))])  # and in it
        assert model.get_model_info("weights") == "private"
        found = ask(model, [IDS])
        with CoreModel.open(new) as bundle:
            held = model.opened.native.segment("weights")
            assert bytes(held) == bytes(bundle.segment("weights"))
        assert np.array_equal(found, expected)
        assert not np.array_equal(found, first)
        model.update_weights(named(values()))
        assert np.array_equal(ask(model, [IDS]), first)
    assert old.read_bytes() == before


def test_sequences_are_empty_afterwards() -> None:
    weights = values()
    with build() as model:
        first = ask(model, [IDS[:1]])
        model.update_weights([lite.Tensor(weights["model.norm.weight"], name="model.norm.weight")])
        assert np.array_equal(ask(model, [IDS[:1]], 0), first)


def tensor(name: str, *shape: int, dtype: npt.DTypeLike = np.float32) -> lite.Tensor:
    return lite.Tensor(np.ones(shape, dtype), name=name)


@pytest.mark.parametrize(
    ("wrong", "field", "words"),
    [
        (tensor("model.norm", 256), "weights", "got 'model.norm'; .*model.norm.weight"),
        (tensor("", 256), "weights", "without a name"),
        (tensor("model.norm.weight", 255), "model.norm.weight", r"shape: .*\[256\], got \[255\]"),
        (
            tensor(LAYER + "self_attn.k_proj.weight", 256, 128),
            "model.layers.3.self_attn.k_proj.weight",
            r"\[128, 256\], got \[256, 128\]",
        ),
        (tensor("model.norm.weight", 256, dtype=np.int8), "model.norm.weight", "dtype: .*float32 or float16, got int8"),
        (np.ones(256, np.float32), "weights", ".*Tensors, got ndarray"),
    ],
)
def test_a_failed_update_does_not_change_the_model(wrong: object, field: str, words: str) -> None:
    with build() as model:
        before = ask(model, [IDS])
        good = tensor(LAYER + "mlp.up_proj.weight", 704, 256)
        with raises(InvalidArgumentError, param=field, match=words):
            model.update_weights([good, wrong])  # type: ignore[list-item]
        assert np.array_equal(ask(model, [IDS]), before)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_that_are_not_finite_are_named(dtype: npt.DTypeLike) -> None:
    with build() as model:
        before = ask(model, [IDS])
        for name, shape, place, value in (
            (LAYER + "mlp.up_proj.weight", (704, 256), (3, 5), np.nan),
            (LAYER + "mlp.up_proj.weight", (704, 256), (703, 255), -np.inf),
            (LAYER + "self_attn.v_proj.weight", (128, 256), (127, 0), np.inf),  # not the first of its weight
            ("model.norm.weight", (256,), (255,), np.nan),
            ("model.norm.weight", (1, 256), (0, 7), np.inf),
        ):
            bad = np.full(shape, np.finfo(dtype).max, dtype)
            bad[place] = value
            what = {"nan": "NaN", "inf": "infinity", "-inf": "-infinity"}[str(value)]
            words = f"^{name}: .*finite values, got {what} at {list(place)}".replace("[", r"\[")
            with pytest.raises(InvalidArgumentError, match=words):
                model.update_weights([lite.Tensor(bad, name=name)])
        with raises(InvalidArgumentError, param="weights", match=r"'model\.norm\.weight' twice"):
            model.update_weights([tensor("model.norm.weight", 256), tensor("model.norm.weight", 256)])
        assert np.array_equal(ask(model, [IDS]), before)


@pytest.mark.parametrize("is_private", [False, True])
def test_a_file_that_took_the_name_is_refused(is_private: bool, tmp_path: Path) -> None:
    """Its other weights are not mixed in, whether the model runs from the file or from a copy already."""
    path, other = tmp_path / "one.psm", tmp_path / "other.psm"
    shutil.copy(BUNDLE, path)
    shutil.copy(BUNDLE, other)
    norm = [tensor("model.norm.weight", 256)]
    with build(path) as model:
        if is_private:
            model.update_weights(norm)
        before = ask(model, [IDS])
        os.replace(other, path)
        with raises(InvalidFileError, param="file", match=f"{path}: file: replaced or changed"):
            model.update_weights(norm)
        assert np.array_equal(ask(model, [IDS]), before)
        path.unlink()
        with raises(InvalidFileError, param="file", match=f"{path}: file: replaced or changed"):
            model.update_weights(norm)


def test_a_file_that_takes_the_name_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "one.psm", tmp_path / "other.psm"
    shutil.copy(BUNDLE, path)
    shutil.copy(BUNDLE, other)

    def pack(*given: object) -> object:
        found = pack_updates(*given)  # type: ignore[arg-type]
        os.replace(other, path)
        return found

    monkeypatch.setattr("penstock.lite.model.pack_updates", pack)
    with build(path) as model:
        with raises(InvalidFileError, param="file", match=f"{path}: file: replaced or changed"):
            model.update_weights([tensor("model.norm.weight", 256)])
        assert model.get_model_info("weights") == "mmap"
