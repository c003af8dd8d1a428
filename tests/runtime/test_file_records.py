"""Bundles of GGUF files are found by the content of the file, and known files are not opened."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import FileAccessError
from penstock.runtime import cache as cache_module
from penstock.runtime import verify
from penstock.runtime.cache import Cache
from penstock.runtime.file_records import FileRecords
from tests.support.errors import raises
from tests.support.gguf_files import llama_file


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The sources that bundles were made from; files count as settled at once."""
    sources: list[Path] = []

    def build(source: Path, out: Path, **_: Any) -> dict[str, Any]:
        sources.append(source)
        out.write_bytes(b"x" * 100)
        return {}

    monkeypatch.setattr(cache_module, "build_in_child", build)
    monkeypatch.setattr(cache_module, "prepare_child", lambda *_, **__: nullcontext())
    monkeypatch.setattr(cache_module, "finish_child", lambda _, source, out, **__: build(source, out))
    monkeypatch.setattr(cache_module, "_find_damage", lambda *_: "")
    monkeypatch.setattr(verify, "_SETTLED_NS", -1)
    return sources


def save(path: Path, vocab_size: int = 300) -> Path:
    path.write_bytes(llama_file(vocab_size=vocab_size))
    return path


def test_equal_content_has_one_bundle(tmp_path: Path, built: list[Path]) -> None:
    cache, first = Cache(tmp_path / "cache"), save(tmp_path / "a.gguf")
    bundle = cache.find_or_build(first)
    assert cache.find_or_build(save(tmp_path / "b.gguf")) == bundle
    assert cache.find_or_build(first.rename(tmp_path / "c.gguf")) == bundle
    assert cache.find_any(tmp_path / "c.gguf") == bundle
    assert cache.find_or_build(save(tmp_path / "a.gguf", 301)) != bundle
    assert len(built) == 2


def test_a_known_file_is_not_opened(tmp_path: Path, built: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, path = Cache(tmp_path / "cache"), save(tmp_path / "a.gguf")
    bundles = [cache.find_or_build(path, scheme) for scheme in (None, "w8a8")]
    opened: list[Any] = []
    original = cache_module._open
    monkeypatch.setattr(cache_module, "_open", lambda *args: opened.append(args) or original(*args))
    assert [cache.find_or_build(path, scheme) for scheme in (None, "w8a8")] == bundles
    assert not opened
    save(path, 301)
    assert cache.find_or_build(path) not in bundles
    assert len(opened) == 1


def test_damaged_records_count_as_missing(tmp_path: Path, built: list[Path]) -> None:
    cache, path = Cache(tmp_path / "cache"), save(tmp_path / "a.gguf")
    bundle = cache.find_or_build(path)
    records = list((cache.folder / "files").iterdir())
    assert len(records) == 2
    for damage in (b"", b"\n{}", b"\xff", records[0].read_bytes()[:-1], records[0].read_bytes(), bytes(1 << 21)):
        for record in records:
            record.write_bytes(damage)
        assert cache.find_or_build(path) == bundle
    cache.clear()
    assert not list((cache.folder / "files").iterdir())


def test_a_digest_is_computed_once(tmp_path: Path, built: list[Path]) -> None:
    records, path, calls = FileRecords(tmp_path / "files"), save(tmp_path / "a.gguf"), []
    digests = {records.digest(path, lambda done, total: calls.append((done, total))) for _ in range(3)}
    assert len(digests) == 1
    assert calls == [(path.stat().st_size,) * 2]
    with raises(FileAccessError, param=None, match="No such file"):
        records.digest(tmp_path / "none.gguf")
