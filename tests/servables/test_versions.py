"""Folders of servables: accepted, ignored and refused entries; policies, labels and the changes of a load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.api_errors import VersionNotFoundError
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, NotFoundError, UnavailableError
from penstock.servables.api.version_policy import VersionPolicy, WantedVersions
from penstock.servables.lifecycle import folder_scan
from penstock.servables.lifecycle.folder_scan import ServableFolder, resolve_inside, scan_folder, scan_servable
from penstock.servables.lifecycle.version_changes import VersionChanges, resolve_version, version_changes_to
from tests.support.errors import raises


def put(root: Path, *names: str) -> Path:
    """Write files with one byte; a name that ends with a slash makes a folder."""
    for name in names:
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
    return root


def test_servables_and_their_versions(tmp_path: Path) -> None:
    put(tmp_path, "digits/servable.py", "digits/1/digits.onnx", "digits/10/digits.onnx", "digits/2/")
    put(tmp_path, "add_sub/servable.py", "add_sub/1/", "no_servable/1/", "README.md", ".old/servable.py")
    found, refused = scan_folder(tmp_path)
    assert {name: list(one.versions) for name, one in found.items()} == {"add_sub": [1], "digits": [1, 2, 10]}
    assert refused == {}
    assert found["digits"].script == tmp_path / "digits" / "servable.py"
    assert found["digits"].version_path(10) == tmp_path / "digits" / "10"


def test_ignored_and_refused_entries(tmp_path: Path) -> None:
    ignored = (".3/", "3.tmp/", "__pycache__/", "data/", "notes.txt", "v1/", "1a/", "2024-05/")
    bad = ("0/", "007/", "-1/", "+2/", "1.5/", "1_000/", "9" * 19 + "/", "4")
    put(tmp_path / "a", "servable.py", "1/", *ignored, *bad)
    found = scan_servable(tmp_path, "a")
    assert list(found.versions) == [1]
    assert sorted(found.refused) == sorted(name.rstrip("/") for name in bad)
    assert "leading zeros" in found.refused["007"]
    assert found.refused["4"] == "a version must be a folder"


def test_links_stay_inside(tmp_path: Path) -> None:
    root, outside = (
        put(tmp_path / "root", "a/servable.py", "a/1/", "store/5/"),
        put(tmp_path / "outside", "servable.py", "1/"),
    )
    (root / "a" / "2").symlink_to(outside / "1")
    (root / "a" / "3").symlink_to(root / "store" / "5")
    (root / "a" / "4").symlink_to("4")
    (root / "a" / "6").symlink_to("nowhere")
    (root / "b").symlink_to(outside)
    put(root, "c/1/")
    (root / "c" / "servable.py").symlink_to(outside / "servable.py")
    (tmp_path / "link").symlink_to(root)  # the folder itself may be one
    found, refused = scan_folder(tmp_path / "link")
    assert list(found) == ["a"]
    assert list(found["a"].versions) == [1, 3]
    assert sorted(found["a"].refused) == ["2", "4", "6"]
    assert "leads out of" in found["a"].refused["2"]
    assert sorted(refused) == ["b", "c"]
    with raises(InvalidFileError, param="path", match="leads out of"):
        resolve_inside(root, root / "a" / ".." / ".." / "outside")


def test_invalid_names_and_folders(tmp_path: Path) -> None:
    put(
        tmp_path,
        "1a/servable.py",
        "a b/servable.py",
        "fine-_1/servable.py",
        "a/servable.py/",
        "a" * 129 + "/servable.py",
    )
    found, refused = scan_folder(tmp_path)
    assert list(found) == ["fine-_1"]
    assert sorted(refused) == sorted(["1a", "a b", "a", "a" * 129])
    assert "start with a letter" in refused["1a"]
    with pytest.raises(NotFoundError):
        scan_servable(tmp_path, "missing")
    with pytest.raises(FileAccessError):
        scan_folder(tmp_path / "missing")


def test_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    put(tmp_path / "a", "servable.py", "helper.py", "1/m/w", "2/w", "data/x")

    def texts() -> Mapping[int, str]:
        return scan_servable(tmp_path, "a").versions

    first = texts()
    assert first == texts()
    assert first[1] != first[2]
    os.utime(tmp_path / "a" / "2" / "w", (1, 1))
    second = texts()
    assert (second[1] == first[1], second[2] == first[2]) == (True, False)
    put(tmp_path / "a", "1/m/v")
    third = texts()
    assert third[1] != second[1]
    for name in ("servable.py", "helper.py"):
        before = texts()
        os.utime(tmp_path / "a" / name, (1, 1))
        assert all(text != before[number] for number, text in texts().items()), name


def test_fingerprint_includes_python_files_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that servable.py may import, and no data, caches, versions, links in a circle or out of the folder."""
    root, outside = tmp_path / "root", put(tmp_path / "outside", "far.py")
    counted = ("helpers/__init__.py", "helpers/a/_b.py", "near/c.py")
    put(root / "a", "servable.py", "1/w", "2/code.py", *counted[:2])
    others = ("helpers/__pycache__/b.py", "helpers/.ipynb_checkpoints/b.py", "helpers/.#b.py", "helpers/data/b.bin")
    put(root / "a", *others, "_mine/b.py", "b.tmp/b.py")
    put(root, "shared/c.py")
    (root / "a" / "near").symlink_to("../shared")
    (root / "a" / "far").symlink_to(outside)
    (root / "a" / "helpers" / "circle").symlink_to("..")

    def texts() -> Mapping[int, str]:
        return scan_servable(root, "a").versions

    before = texts()
    for name in counted:
        os.utime(root / "a" / name, (1, 1))
        after = texts()
        assert all(after[number] != text for number, text in before.items()), name
        before = after
    for name in (*others, "_mine/b.py", "b.tmp/b.py", "far/far.py"):
        os.utime(root / "a" / name, (1, 1))
        assert texts() == before, name
    os.utime(root / "a" / "2" / "code.py", (1, 1))
    assert [texts()[number] == before[number] for number in (1, 2)] == [True, False]
    monkeypatch.setattr(folder_scan, "MAX_FILES", 10)
    put(root / "a", *(f"data/{number}" for number in range(20)))
    texts()
    put(root / "a", *(f"helpers/{number}.py" for number in range(20)))
    with raises(InvalidFileError, param="path", match=r"helpers .* 10 folders"):
        texts()


@pytest.mark.parametrize(
    ("text", "chosen", "written"),
    [
        ("latest", {9}, "latest:1"),
        ("latest:2", {3, 9}, "latest:2"),
        ("latest:7", {1, 3, 9}, "latest:7"),
        ("all", {1, 3, 9}, "all"),
        ("3", {3}, "3"),
        ("4, 1,1", {1, 4}, "1,4"),
    ],
)
def test_policies(text: str, chosen: set[int], written: str) -> None:
    policy = VersionPolicy.parse(text)
    assert policy.choose([3, 9, 1]) == chosen
    assert str(policy) == written
    assert VersionPolicy.parse(written) == policy


@pytest.mark.parametrize(
    "text", ["", "latest:", "latest:0", "latest:-1", "some", "1,", "0", "007", "1;2", "all,1", "1.0"]
)
def test_invalid_policies(text: str) -> None:
    with raises(InvalidArgumentError, param="versions"):
        VersionPolicy.parse(text)


def folder(*numbers: int, changed: tuple[int, ...] = ()) -> ServableFolder:
    texts = {number: f"text of {number}{' changed' if number in changed else ''}" for number in sorted(numbers)}
    return ServableFolder("a", Path("a"), texts, {})


def loaded(*numbers: int) -> dict[int, str]:
    return {number: f"text of {number}" for number in numbers}


def steps(changes: VersionChanges) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    switch = changes.switch()
    return changes.load, switch.ready, switch.drain


def latest(number: int, **labels: int) -> WantedVersions:
    return WantedVersions(VersionPolicy(latest=number), labels)


def test_a_new_version_replaces_the_oldest() -> None:
    assert steps(version_changes_to(latest(1), folder(1), {})) == ((1,), (1,), ())
    assert steps(version_changes_to(latest(1), folder(1, 2), loaded(1))) == ((2,), (2,), (1,))
    assert steps(version_changes_to(latest(2), folder(1, 2, 3), loaded(1, 2))) == ((3,), (2, 3), (1,))
    assert steps(version_changes_to(latest(2), folder(1, 2), loaded(1, 2))) == ((), (1, 2), ())
    assert steps(version_changes_to(latest(1), folder(1), loaded(1, 2))) == ((), (1,), (2,)), "its folder is gone"


def test_changed_files_are_loaded_beside_the_old_ones() -> None:
    assert steps(version_changes_to(latest(2), folder(1, 2, changed=(2,)), loaded(1, 2))) == ((2,), (1, 2), ())


def test_listed_versions() -> None:
    named = WantedVersions(VersionPolicy.parse("1,3"))
    changes = version_changes_to(named, folder(1, 2), loaded(2))
    assert steps(changes) == ((1,), (1, 2), ()), "one goes on for the one that is missing"
    assert steps(version_changes_to(named, folder(1, 2, 3), loaded(1, 2))) == ((3,), (1, 3), (2,))


def test_no_wanted_version_exists() -> None:
    with raises(InvalidFileError, param="versions", match="versions 7, got 1, 2"):
        version_changes_to(WantedVersions(VersionPolicy.parse("7")), folder(1, 2), loaded(1))
    refused = ServableFolder("a", Path("a"), {}, {"007": "leading zeros"})
    with raises(InvalidFileError, param="versions", match="; 007:"):
        version_changes_to(latest(1), refused, loaded(1))


def test_labels_move_only_to_existing_versions() -> None:
    moved, stayed = (
        version_changes_to(latest(1, stable=1, canary=2), found, loaded(1), {"stable": 1, "canary": 1}).switch()
        for found in (folder(1, 2), folder(1))
    )
    assert (moved.ready, moved.labels, moved.labels_kept) == ((1, 2), {"stable": 1, "canary": 2}, ())
    assert (stayed.ready, stayed.labels, stayed.labels_kept) == ((1,), {"stable": 1, "canary": 1}, ("canary",))


def test_a_label_keeps_its_version() -> None:
    changes = version_changes_to(latest(1, stable=1), folder(1, 2, 3), loaded(1, 2), {"stable": 1})
    assert steps(changes) == ((3,), (1, 3), (2,))
    switch = version_changes_to(latest(1, stable=2), folder(1, 3), loaded(1, 3), {"stable": 1}).switch()
    assert (switch.ready, switch.labels, switch.drain) == ((1, 3), {"stable": 1}, ())
    switch = version_changes_to(latest(1, stable=2), folder(1, 2, 3), loaded(1, 3), {"stable": 1}).switch()
    assert (switch.ready, switch.labels, switch.drain) == ((2, 3), {"stable": 2}, (1,))


def test_label_for_a_missing_version_is_dropped() -> None:
    changes = version_changes_to(latest(1, stable=9), folder(1), {}, {})
    assert changes.load == (1,)
    assert (changes.switch().labels, changes.switch().labels_kept) == ({}, ("stable",))


@pytest.mark.parametrize("labels", [{"1": 1}, {"": 1}, {"a": 0}, {"a": True}, {"a b": 1}, {"a": "1"}])
def test_invalid_labels(labels: dict[str, int]) -> None:
    with raises(InvalidArgumentError, param="labels"):
        WantedVersions(labels=labels)


def test_version_of_a_request() -> None:
    ready, labels = (2, 10), {"stable": 2, "canary": 11}
    assert [resolve_version("one", text, ready, labels) for text in ("", "2", "stable")] == [10, 2, 2]
    with raises(VersionNotFoundError, param="model_version", match="'3'; .* 2, 10, canary, stable"):
        resolve_version("one", "3", ready, labels, known=(1, 2, 10))
    for text in ("1", "canary"):
        with raises(UnavailableError, param="model_version", match=text):
            resolve_version("one", text, ready, labels, known=(1, 2, 10))
    for text in ("02", "-2", "old", "latest", "2 "):
        with pytest.raises(VersionNotFoundError):
            resolve_version("one", text, ready, labels)
    with pytest.raises(UnavailableError):
        resolve_version("one", "", (), {})
