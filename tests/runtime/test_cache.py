"""The cache of bundles: made once, found again, bounded, sound after a kill at any point."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import env
from penstock.checkpoint.folder import Checkpoint
from penstock.errors import FileAccessError, InvalidArgumentError, PenstockError
from penstock.runtime import cache as cache_module
from penstock.runtime import temporary_folder as temporary
from penstock.runtime.build import Progress
from penstock.runtime.cache import Cache, CacheNotWritableError, bundle_key
from penstock.runtime.open import bundle_of
from penstock.runtime.temporary_folder import temporary_folder
from penstock.runtime.verify import remember_when_written
from tests.support.checkpoint_folders import write_folder
from tests.support.errors import raises
from tests.support.gguf_files import llama_file, text_metadata
from tests.support.tiny_graph import tiny_graph, write_bundle
from tests.support.waiting import until


class Builder:
    """Stands in for the child process: writes a file of ``num_bytes`` and counts its calls."""

    def __init__(self, num_bytes: int = 1000) -> None:
        self.num_bytes = num_bytes
        self.calls: list[tuple[str | None, str | None]] = []

    def __call__(
        self,
        source: Path,
        out: Path,
        *,
        scheme: str | None,
        network: str | None,
        rank: int | None,
        kind: str,
        progress: Any,
    ) -> dict[str, Any]:
        self.calls.append((scheme, network))
        if progress is not None:
            progress(Progress("capture"))
        out.write_bytes(b"x" * self.num_bytes)
        return {}


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    built = Builder()
    monkeypatch.setattr(cache_module, "build_in_child", built)
    monkeypatch.setattr(cache_module, "_find_damage", lambda *_: "")  # what it writes is no bundle
    monkeypatch.setattr(cache_module, "remember_when_written", lambda path, note: note(path.stat()))
    return built


def wait_for_disk() -> None:
    """Wait until the disk has new bundles, and their records say so."""
    for thread in threading.enumerate():
        if thread.name == "penstock-write-behind":
            thread.join()


def age(cache: Cache, seconds: float = 1000.0) -> None:
    for path in cache.folder.glob("*.json"):
        stamp = path.stat().st_mtime - seconds
        os.utime(path, (stamp, stamp))


def test_a_damaged_bundle_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def build(source: Path, out: Path, **_: Any) -> dict[str, Any]:
        made.append(write_bundle(out, tiny_graph()))
        return {}

    monkeypatch.setattr(cache_module, "build_in_child", build)
    cache, folder = Cache(tmp_path / "cache"), write_folder(tmp_path / "model")
    path = cache.find_or_build(folder)
    data = path.read_bytes()
    path.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    assert cache.find_or_build(folder) == path
    assert path.read_bytes() == data
    assert cache.find_or_build(folder) == path
    assert len(made) == 2


def test_never_verifies_a_bundle_that_was_never_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may have damaged it, and no other start noticed."""
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "records"))
    builds = []

    def build(source: Path, out: Path, **_: Any) -> dict[str, Any]:
        builds.append(write_bundle(out, tiny_graph()))
        return {}

    monkeypatch.setattr(cache_module, "build_in_child", build)
    cache, folder = Cache(tmp_path / "cache"), write_folder(tmp_path / "model")
    with monkeypatch.context() as cut:
        cut.setattr(cache_module, "remember_when_written", lambda *_: None)
        path = cache.find_or_build(folder, verify="never")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert not cache.list()[0].is_on_disk
    assert cache.find_or_build(folder, verify="never").read_bytes() == data
    wait_for_disk()
    assert len(builds) == 2
    assert cache.list()[0].is_on_disk


def test_overwritten_weights_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "records"))
    builds = []

    def build(source: Path, out: Path, **_: Any) -> dict[str, Any]:
        builds.append(write_bundle(out, tiny_graph()))
        return {}

    monkeypatch.setattr(cache_module, "build_in_child", build)
    cache, folder = Cache(tmp_path / "cache"), write_folder(tmp_path / "model")
    path = cache.find_or_build(folder)
    wait_for_disk()
    data, status = path.read_bytes(), path.stat()
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    for verify, expected in (("never", damaged), ("once", data)):
        path.write_bytes(damaged)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert cache.find_or_build(folder, verify=verify) == path
        assert path.read_bytes() == expected
    assert len(builds) == 2
    (line,) = caplog.messages
    assert f"the cached bundle of {folder} is damaged and is built again" in line


@pytest.mark.parametrize("record", [b"[" * 100_000, b'{"num_bytes": ' + b"1" * 100_000 + b"}", b"x" * (1 << 21), b"[]"])
def test_a_damaged_record_is_replaced(record: bytes, tmp_path: Path, builder: Builder) -> None:
    cache, folder = Cache(tmp_path / "cache"), write_folder(tmp_path / "model")
    path = cache.find_or_build(folder)
    path.with_suffix(".json").write_bytes(record)
    assert cache.list() == []
    assert cache.find_or_build(folder) == path
    assert len(builder.calls) == 2
    assert [entry.path for entry in cache.list()] == [path]


def test_a_pipe_is_ignored_as_a_cache_record(tmp_path: Path, builder: Builder) -> None:
    cache, folder = Cache(tmp_path / "cache"), write_folder(tmp_path / "model")
    path = cache.find_or_build(folder)
    path.with_suffix(".json").unlink()
    os.mkfifo(path.with_suffix(".json"))
    assert cache.find_or_build(folder) == path
    assert len(builder.calls) == 2


def test_weights_of_equal_size_and_time_are_others(tmp_path: Path, builder: Builder) -> None:
    cache, folder = Cache(tmp_path / "cache"), write_folder(tmp_path / "model")
    weights = folder / "model.safetensors"
    first, status = cache.find_or_build(folder), weights.stat()
    data = weights.read_bytes()

    def is_changed_later() -> bool:  # by a tick of the file system's clock at least
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
        return weights.stat().st_ctime_ns != status.st_ctime_ns

    until(is_changed_later)
    assert cache.find_or_build(folder) != first
    assert len(builder.calls) == 2


def test_a_bundle_is_made_once(tmp_path: Path, builder: Builder) -> None:
    cache, folder = Cache(tmp_path / "cache"), write_folder(tmp_path / "model")
    first = cache.find_or_build(folder)
    assert cache.find_or_build(str(folder)) == first
    assert builder.calls == [("f32", None)]
    assert [entry.scheme for entry in cache.list()] == ["f32"]
    assert not list(cache.folder.glob("*.lock"))


def test_a_folder_whose_bundle_is_known_is_not_opened(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is opened again when a file changes or is added, in it or in a folder inside."""
    monkeypatch.setattr("penstock.runtime.file_records.is_settled", lambda _status: True)
    folder, cache, opened = write_folder(tmp_path / "model"), Cache(tmp_path / "cache"), []
    (folder / "1_Pooling").mkdir()
    open_checkpoint = cache_module._open
    monkeypatch.setattr(cache_module, "_open", lambda *given: opened.append(1) or open_checkpoint(*given))

    def count() -> int:
        opened.clear()
        cache.find_or_build(folder)
        return len(opened)

    assert (count(), count(), len(builder.calls)) == (1, 0, 1)
    for name in ("config.json", "generation_config.json", "1_Pooling/notes.txt"):
        path = folder / name
        path.write_text(path.read_text() + " " if path.exists() else "{}")
        assert (count(), count()) == (1, 0)
    path.unlink()
    assert count() == 0  # the files are again those that have a bundle


def test_every_change_that_matters_makes_another_bundle(tmp_path: Path, builder: Builder) -> None:
    cache, folder = Cache(tmp_path / "cache"), write_folder(tmp_path / "model")
    script = tmp_path / "net.py"
    script.write_text("class Net: ...")
    paths = [cache.find_or_build(folder), cache.find_or_build(folder, "w8a8")]
    paths.append(cache.find_or_build(folder, network=f"{script}:Net"))
    script.write_text("class Net: pass")
    paths.append(cache.find_or_build(folder, network=f"{script}:Net"))
    os.utime(folder / "model.safetensors", (1, 1))
    paths.append(cache.find_or_build(folder))
    (folder / "chat_template.jinja").write_text("x")
    paths.append(cache.find_or_build(folder))
    assert len(set(paths)) == len(paths) == len(builder.calls)


def test_the_key_covers_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(write_folder(tmp_path / "model"))
    before = bundle_key(checkpoint, "f32")
    monkeypatch.setattr(cache_module, "CACHE_VERSION", 999)
    assert bundle_key(checkpoint, "f32") != before


def test_the_least_recently_used_bundle_makes_room(tmp_path: Path, builder: Builder) -> None:
    cache, folder = Cache(tmp_path / "cache", max_bytes=2500), write_folder(tmp_path / "model")
    first, second = cache.find_or_build(folder, "f32"), cache.find_or_build(folder, "f16")
    age(cache)
    assert cache.find_or_build(folder, "f32") == first
    third = cache.find_or_build(folder, "bf16")
    assert {entry.path for entry in cache.list()} == {first, third}
    assert not second.exists()


def test_a_bundle_larger_than_the_bound_is_kept_until_the_next(tmp_path: Path, builder: Builder) -> None:
    cache, folder = Cache(tmp_path / "cache", max_bytes=10), write_folder(tmp_path / "model")
    first = cache.find_or_build(folder, "f32")
    assert first.exists()
    age(cache)
    second = cache.find_or_build(folder, "f16")
    assert not first.exists()
    assert second.exists()


def test_a_bundle_found_just_now_is_never_removed(tmp_path: Path, builder: Builder) -> None:
    cache, folder = Cache(tmp_path / "cache", max_bytes=10), write_folder(tmp_path / "model")
    first = cache.find_or_build(folder, "f32")
    cache.find_or_build(folder, "f16")
    assert first.exists()


def test_half_entries_are_made_again(tmp_path: Path, builder: Builder) -> None:
    """Whatever a kill left: a bundle without a record, a record without a bundle, a bundle of the wrong size."""
    cache, folder = Cache(tmp_path / "cache"), write_folder(tmp_path / "model")
    path = cache.find_or_build(folder)
    record = path.with_suffix(".json")
    damages = [record.unlink, path.unlink, lambda: path.write_bytes(b"")]
    damages += [lambda text=text: record.write_text(text) for text in ("{", "[1]", '{"num_bytes":1000}')]
    for damage in damages:
        damage()
        assert cache.find_or_build(folder) == path
        assert path.stat().st_size == 1000
    assert len(builder.calls) == 7


def test_files_of_dead_builders_are_removed(tmp_path: Path, builder: Builder) -> None:
    cache, folder = Cache(tmp_path / "cache"), write_folder(tmp_path / "model")
    key = cache.find_or_build(folder).stem
    for name in (f".{'a' * 64}.psm.xyz.partial", f".{key}.psm.abc.partial"):
        (cache.folder / name).mkdir()
        (cache.folder / name / "x.psm").write_bytes(b"half")
    (cache.folder / f".{key}.json.123.partial").write_text("{")
    cache.find_or_build(folder, "w8a8")
    assert not list(cache.folder.glob(".*partial"))


def test_clear_removes_everything_and_says_what(tmp_path: Path, builder: Builder) -> None:
    cache, folder = Cache(tmp_path / "cache"), write_folder(tmp_path / "model")
    assert cache.clear() == (0, 0)
    for scheme in ("f32", "w4a8"):
        cache.find_or_build(folder, scheme)
    assert cache.clear() == (2, 2000)
    assert cache.list() == []
    assert list(cache.folder.iterdir()) == []


def test_errors_name_what_is_wrong(tmp_path: Path, builder: Builder) -> None:
    folder = write_folder(tmp_path / "model")
    cache = Cache(tmp_path / "cache")
    with raises(InvalidArgumentError, param="scheme"):
        cache.find_or_build(folder, "int3")
    with raises(InvalidArgumentError, param="network", match=r"file\.py"):
        cache.find_or_build(folder, network="net.py")
    with raises(FileAccessError, param="network", match=r"gone\.py"):
        cache.find_or_build(folder, network=f"{tmp_path}/gone.py:Net")
    (tmp_path / "file").write_text("")
    with raises(FileAccessError, match="PENSTOCK_CACHE_DIR"):
        Cache(tmp_path / "file" / "cache").find_or_build(folder)
    assert builder.calls == []


@pytest.mark.parametrize("place", ["/.half.partial/x.psm", ""])
def test_an_unwritable_cache_names_the_variable_to_set(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full: no file can be written, or no folder can be made."""

    def fail(source: Path, out: Path, **_: Any) -> dict[str, Any]:
        raise FileAccessError(f"{out.parent}{place}: No space left on device")

    monkeypatch.setattr(cache_module, "build_in_child", fail)
    cache = Cache(tmp_path / "cache")
    message = f"^{cache.folder}: No space left on device. Set PENSTOCK_CACHE_DIR"
    with pytest.raises(FileAccessError, match=message):
        cache.find_or_build(write_folder(tmp_path / "model"))
    assert list(cache.folder.iterdir()) == []


def test_a_file_system_without_locks_is_an_unwritable_cache(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for a lock of another process, which would be waited for without end."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache_module.fcntl, "flock", flock)
    with raises(CacheNotWritableError, match="No locks available. Set PENSTOCK_CACHE_DIR"):
        Cache(tmp_path / "cache").find_or_build(write_folder(tmp_path / "model"))


def test_files_of_other_users_in_the_cache_do_not_matter(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a shared folder with the sticky bit: files can be made, those of others can be neither locked nor removed.

    Bundles of others that are too many, and leftovers of their builds.
    """
    cache, folder = Cache(tmp_path / "cache", max_bytes=0), write_folder(tmp_path / "model")
    foreign = {cache.find_or_build(folder, scheme).stem for scheme in ("f32", "w4a8")}
    age(cache)
    keys = {"a" * 64, "b" * 64}
    for key in keys:
        (cache.folder / f".{key}.psm.xyz.partial").write_bytes(b"half")
    real_open, real_unlink = os.open, Path.unlink

    def open_own(path: Any, *arguments: Any) -> int:
        if Path(path).stem == "a" * 64:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real_open(path, *arguments)

    def unlink_own(path: Path, missing_ok: bool = False) -> None:
        if path.suffix != ".lock" and any(key in path.name for key in foreign | keys):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        real_unlink(path, missing_ok)

    monkeypatch.setattr(os, "open", open_own)
    monkeypatch.setattr(Path, "unlink", unlink_own)
    assert cache.find_or_build(folder, "w8a8").exists()
    assert foreign < {entry.key for entry in cache.list()}


def build_slowly(folder: Path, cache_folder: Path, log: Path) -> None:
    """In a process of its own: a builder that takes half a second and notes that it ran."""

    def build(source: Path, out: Path, **_: object) -> dict[str, Any]:
        with log.open("a") as stream:
            stream.write("built\n")
        time.sleep(0.5)
        write_bundle(out, tiny_graph())
        return {}

    cache_module.build_in_child = build  # type: ignore[assignment]
    Cache(cache_folder).find_or_build(folder)


def test_two_processes_at_once_make_one_bundle(tmp_path: Path) -> None:
    folder, log = write_folder(tmp_path / "model"), tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=build_slowly, args=(folder, tmp_path / "cache", log)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(600)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert log.read_text() == "built\n"
    assert len(Cache(tmp_path / "cache").list()) == 1


def test_a_waiting_build_reports_and_takes_over_from_a_killed(tmp_path: Path, builder: Builder) -> None:
    folder, log = write_folder(tmp_path / "model"), tmp_path / "log"
    script = f"""
import time
from pathlib import Path
from types import SimpleNamespace
from penstock.runtime import cache
def build(source, out, **_):
    Path({str(log)!r}).write_text("started")
    time.sleep(600)
cache.build_in_child = build
cache.Cache({str(tmp_path / "cache")!r}).find_or_build({str(folder)!r})
"""
    worker = subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    until(log.exists)
    stages: list[str] = []

    def progress(progress: Progress) -> None:
        stages.append(progress.stage)
        worker.send_signal(signal.SIGKILL)
        worker.wait()

    path = Cache(tmp_path / "cache").find_or_build(folder, progress=progress)
    assert stages == ["wait", "first", "capture"]
    assert path.exists()
    assert len(builder.calls) == 1


def test_a_failed_build_leaves_the_cache_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PenstockError("no")

    monkeypatch.setattr(cache_module, "build_in_child", fail)
    cache = Cache(tmp_path / "cache")
    with pytest.raises(PenstockError, match="no"):
        cache.find_or_build(write_folder(tmp_path / "model"))
    assert list(cache.folder.iterdir()) == []


@pytest.mark.parametrize("moment", ["build", "record", "written"])
def test_a_kill_at_any_moment_leaves_no_half_bundle(
    moment: str, tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends within the build, before the record, or before the disk has the file."""
    folder, home = write_folder(tmp_path / "model"), tmp_path / "cache"

    def end(*_: object, **__: object) -> None:
        os._exit(7)

    def end_half(source: Path, out: Path, **_: object) -> None:
        out.with_name(f".{out.name}.0.partial").write_bytes(b"half")
        os._exit(7)

    child = os.fork()
    if child == 0:
        places = {"build": "build_in_child", "record": "remember_when_written", "written": "remember_when_written"}
        monkeypatch.setattr(cache_module, places[moment], end_half if moment == "build" else end)
        if moment == "record":
            monkeypatch.setattr(Cache, "_write_record", end)
        Cache(home).find_or_build(folder)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    cached = Cache(home).list()
    path = Cache(home).find_or_build(folder)
    assert path.read_bytes() == b"x" * builder.num_bytes
    assert (len(cached), len(builder.calls)) == ((1, 0) if moment == "written" else (0, 1))
    assert not list(home.glob(".*"))


def test_a_new_bundle_is_verified_until_the_disk_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "records"))
    records = tmp_path / "records" / "verified"
    synced: list[int] = []

    def fail(descriptor: int) -> None:
        synced.append(descriptor)
        raise OSError(28, "No space left on device")

    path = write_bundle(tmp_path / "new.psm", tiny_graph())
    monkeypatch.setattr(os, "fsync", fail)
    remember_when_written(path).join()
    assert (len(synced), records.exists()) == (1, False)
    monkeypatch.setattr(os, "fsync", synced.append)
    remember_when_written(path).join()
    assert len(synced) == 2
    assert len(list(records.iterdir())) == 1


@pytest.mark.parametrize("use_case", ["read-only", "full"])
def test_an_unwritable_cache_is_a_warning(
    use_case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bundle is then made for this run only, and nothing is left of it."""
    folder, cache = write_folder(tmp_path / "model"), tmp_path / "cache"
    made: list[Path] = []

    def build(source: Path, out: Path, **_: Any) -> dict[str, Any]:
        if use_case == "full" and out.is_relative_to(cache):
            raise FileAccessError(f"{out}: No space left on device")
        made.append(write_bundle(out, tiny_graph()))
        return {}

    if use_case == "read-only":
        cache.write_bytes(b"")  # no folder can be made there, not even by root
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(cache))
    monkeypatch.setattr(cache_module, "build_in_child", build)
    monkeypatch.setattr("penstock.runtime.build.build_in_child", build)
    with bundle_of(folder, None) as bundle:
        assert made == [bundle]
        assert bundle.exists()
    assert not bundle.exists()
    assert ["PENSTOCK_CACHE_DIR" in record.getMessage() for record in caplog.records] == [True]


def test_a_bundle_is_made_in_memory_without_a_writable_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with temporary_folder() as folder:
        assert Path(folder).parent == Path("/dev/shm")  # noqa: S108
    monkeypatch.setattr(temporary, "_MEMORY", str(tmp_path / "absent"))
    with raises(FileAccessError, match="TMPDIR"):
        temporary_folder()


@pytest.mark.parametrize(("on_disk", "in_memory", "expected"), [(100, 500, "memory"), (100, 50, ""), (200, 500, "")])
def test_a_bundle_is_made_where_there_is_room(
    on_disk: int, in_memory: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, source = tmp_path / "memory", tmp_path / "source"
    for path in (memory, source):
        path.mkdir()
    (source / "model.safetensors").write_bytes(bytes(200))
    (source / "original").mkdir()
    (source / "original" / "consolidated.00.pth").write_bytes(bytes(200))  # not a weight of the model
    free = {memory: in_memory, tmp_path: on_disk}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temporary, "_MEMORY", str(memory))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free[Path(path)]))
    for whole in (source, source / "model.safetensors"):
        with temporary_folder(whole) as folder:
            assert Path(folder).parent == tmp_path / expected


def test_a_user_without_a_home_folder_has_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("PENSTOCK_CACHE_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert env.cache_dir() == Path("/.cache/penstock")
    assert env.state_dir() == Path("/.local/state/penstock")


def test_a_child_reads_a_gguf_file_while_it_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to write only if no bundle of the content is there, and ends with the call in any case."""
    events: list[str] = []

    @contextlib.contextmanager
    def prepare(source: Path, **_: Any) -> Iterator[str]:
        events.append(source.name)
        yield source.name
        events.append("end")

    def finish(child: str, source: Path, out: Path, **_: Any) -> dict[str, Any]:
        events.append(f"{child} writes")
        write_bundle(out, tiny_graph())
        return {}

    monkeypatch.setattr(cache_module, "prepare_child", prepare)
    monkeypatch.setattr(cache_module, "finish_child", finish)
    cache, data = Cache(tmp_path / "cache"), llama_file(text_metadata())
    monkeypatch.setattr("penstock.runtime.file_records.is_settled", lambda _status: True)
    paths = [tmp_path / "first.gguf", tmp_path / "second.gguf"]
    for path in paths:
        path.write_bytes(data)
    found = [cache.find_or_build(path) for path in (*paths, *paths)]
    assert len(set(found)) == 1
    assert events == ["first.gguf", "first.gguf writes", "end", "second.gguf", "end"]
