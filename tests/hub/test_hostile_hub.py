"""A hub that answers wrongly: nothing leaves the cache folder, nothing grows or lasts without bound."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from penstock.cli.model_source import describe_plan
from penstock.errors import InvalidFileError, NotFoundError, PenstockError, UnavailableError
from penstock.hub import remote, transfer
from penstock.hub.allowed_files import choose_files
from penstock.hub.content_hash import ContentHash
from penstock.hub.download import download
from penstock.hub.download_estimate import estimate_download
from penstock.hub.downloaded import find_downloaded, repository_folder
from penstock.hub.listing import decode_listing
from penstock.hub.names import ModelName
from penstock.hub.remote_model import RemoteFile, RemoteModel
from tests.support.errors import raises
from tests.support.hub_server import TOKEN, HubServer, git_digest

NAME = ModelName("o/n")
FILES = {"config.json": b'{"model_type": "x"}', "tokenizer.json": b'{"right": 1}' * 20, "model.safetensors": b"w" * 500}


@pytest.fixture
def cache(hub: HubServer, hub_cache: Path) -> Path:
    """The cache folder of this process, whose hub has ``NAME``."""
    hub.add(str(NAME), FILES)
    return hub_cache


def pull() -> Path:
    return download(estimate_download(NAME))


def contents(snapshot: Path) -> dict[str, bytes]:
    return {path.relative_to(snapshot).as_posix(): path.read_bytes() for path in snapshot.rglob("*") if path.is_file()}


def outside(tmp_path: Path, cache: Path) -> list[Path]:
    """The files that are not in the cache."""
    return [path for path in tmp_path.rglob("*") if path != cache and cache not in (*path.parents, *cache.parents)]


def hostile_paths(tmp_path: Path) -> list[str]:
    return [f"{tmp_path}/evil", "../../../../evil", "..", "/", "../evil.json", "a/../../../evil.json", "b" * 40, ""]


@pytest.mark.parametrize("number", range(8))
def test_an_etag_is_no_path(number: int, hub: HubServer, cache: Path, tmp_path: Path) -> None:
    value = hostile_paths(tmp_path)[number]
    hub.headers["HEAD "] = {"ETag": f'"{value}"', "X-Linked-Etag": f'"{value}"'}
    assert contents(pull()) == FILES
    assert not any(path.is_file() for path in outside(tmp_path, cache) if cache not in path.parents)


@pytest.mark.parametrize("commit", ["../../../../evil", "c" * 40])
def test_another_commit_in_a_header_changes_nothing(commit: str, hub: HubServer, cache: Path) -> None:
    hub.headers["/"] = {"X-Repo-Commit": commit}
    assert pull() == repository_folder(NAME) / "snapshots" / hub.repositories[str(NAME)].refs["main"]


def _change(value: Any, choose: random.Random, hostile: list[Any]) -> Any:
    """Return a copy of a JSON value with one part replaced or removed."""
    if isinstance(value, dict) and value and choose.random() < 0.9:
        key = choose.choice(list(value))
        if choose.random() < 0.1:
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: _change(value[key], choose, hostile)}
    if isinstance(value, list) and value and choose.random() < 0.9:
        place = choose.randrange(len(value))
        changed = _change(value[place], choose, hostile)
        return [*value[:place], changed, *value[place + (choose.random() < 0.7) :]]
    return choose.choice(hostile)


HEADERS = ["ETag", "X-Linked-Etag", "X-Linked-Size", "X-Repo-Commit", "Location", "Content-Range", "Content-Encoding"]
HEADERS += ["Content-Disposition", "Content-Type", "X-Xet-Hash", "Link", "X-Error-Code", "Retry-After", "X-HF-Warning"]


def test_no_header_and_no_field_leaves_the_cache(hub: HubServer, cache: Path, tmp_path: Path) -> None:
    choose = random.Random(1)
    paths = hostile_paths(tmp_path)
    names = [*paths, "config.json", "1_Pooling/../../../evil.json", "x\x1b[2J.json", "a" * 300 + ".json", "evil.py"]
    hostile = [*names, None, 5, -1, 2**80, 1.5, True, [], {}, ["x"], {"sha256": paths[0]}, git_digest(b""), "0" * 64]
    values = [*(value.replace("\x1b", "") for value in names), "gzip", "-1", "9" * 30, "bytes 5-1/2", "text/html"]
    values += ["file:///etc/passwd", "http://[x", f"{hub.url}/api/models/o/n", "é"]
    outcomes: dict[str, int] = {}
    for _ in range(70):
        fuzzed = choose.random()
        with_field, with_digests = fuzzed < 0.7, choose.random() < 0.6
        hub.headers = {
            choose.choice(["/", "HEAD ", "/api/", "/resolve/", "/cdn/"]): {
                choose.choice(HEADERS): choose.choice(values) for _ in range(choose.randrange(1, 4))
            }
            for _ in range(2)
            if fuzzed > 0.4
        }

        def edit(listing: dict[str, Any], f: bool = with_field, d: bool = with_digests) -> object:
            if not d:
                listing["siblings"] = [{"rfilename": sibling["rfilename"]} for sibling in listing["siblings"]]
            return _change(listing, choose, hostile) if f else listing

        hub.edit_listing = edit
        try:
            found = contents(pull())
            outcome = "downloaded"
            assert all(FILES[name] == data for name, data in found.items())
        except PenstockError as error:
            outcome = str(error.code)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        assert not any(path.is_file() for path in outside(tmp_path, cache))
        assert all(path.resolve().is_relative_to(cache.resolve()) for path in cache.rglob("*"))
    assert outcomes["downloaded"] > 5
    assert outcomes["invalid_listing"] > 5
    assert outcomes["invalid_header"] > 2


def _first(field: str, value: object) -> Callable[[dict[str, Any]], object]:
    def edit(listing: dict[str, Any]) -> object:
        listing["siblings"][0][field] = value
        return listing

    return edit


def _top(field: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda listing: listing | {field: value}


MALFORMED = [
    *[(_first("size", value), "siblings[0].size") for value in ("12", 1e300, -5, 10**30, True)],
    *[(_first("rfilename", value), "siblings[0].rfilename") for value in (5, None, ["a"])],
    *[(_first("blobId", value), "siblings[0].blobId") for value in (5, "../x", "A" * 40)],
    *[(_first("lfs", value), "siblings[0].lfs") for value in ([1], 5)],
    (_first("lfs", {"sha256": "x"}), "siblings[0].lfs.sha256"),
    (_top("siblings", [None]), "siblings[0]"),
    *[(_top("siblings", value), "siblings") for value in ("abc", {"a": 1}, None)],
    *[(_top("sha", value), "sha") for value in (5, "../../../etc", None)],
    (lambda listing: listing | {"siblings": [*listing["siblings"], {"rfilename": "config.json"}]}, None),
    *[(lambda _, data=data: data, None) for data in (b"[1,2]", b"5", b"null", b"", b"\xff\xfe\x00", b"[" * 200_000)],
    (lambda _: b'{"x":' + b"[" * 200_000, None),
    (lambda _: b" <html>login</html>", "HF_ENDPOINT"),
]


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_a_malformed_listing_is_named(number: int, hub: HubServer, cache: Path) -> None:
    hub.edit_listing, param = MALFORMED[number]  # type: ignore[assignment]
    with raises(InvalidFileError, code="invalid_listing") as raised:
        pull()
    if param is not None:
        assert raised.value.param == param
    assert str(raised.value).isprintable()


def test_names_that_no_file_can_have_are_left_out(hub: HubServer, cache: Path) -> None:
    names = ["a" * 300 + ".json", "a\x00.json", "a\n\x1b[31m.json"]
    hub.edit_listing = lambda listing: (
        listing | {"siblings": [*listing["siblings"], *({"rfilename": name, "size": 2} for name in names)]}
    )
    assert contents(pull()) == FILES


@pytest.mark.parametrize("path", ["/api/", "config.json", "tokenizer.json"])
def test_a_body_without_an_end_is_cut_off(
    path: str, hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_SMALL_BYTES", 1 << 20)
    hub.endless[path] = b'{"a": "'
    with raises(InvalidFileError, code="hub_too_large" if path == "/api/" else "wrong_length"):
        pull()


def test_a_compressed_listing_is_read_up_to_its_limit(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.headers["/api/"] = {"Content-Encoding": "gzip"}
    hub.edit_listing = lambda listing: gzip.compress(json.dumps(listing).encode())
    assert contents(pull()) == FILES
    monkeypatch.setattr(remote, "MAX_SMALL_BYTES", 1 << 20)
    hub.edit_listing = lambda _: gzip.compress(b'{"x": "' + b" " * (20 << 20))
    with raises(InvalidFileError, code="hub_too_large"):
        pull()
    hub.edit_listing = lambda listing: json.dumps(listing).encode()
    with raises(InvalidFileError, code="invalid_response"):
        pull()


def test_bytes_after_a_compressed_body_are_not_read(hub: HubServer, cache: Path) -> None:
    listings: list[bytes] = []

    def keep(listing: dict[str, Any]) -> object:
        listings.append(json.dumps(listing).encode())
        return listing

    hub.edit_listing = keep
    estimate_download(NAME)
    hub.headers["/api/"], hub.endless["/api/"] = {"Content-Encoding": "gzip"}, gzip.compress(listings[0])
    assert contents(pull()) == FILES


@pytest.mark.parametrize("path", ["/api/", "config.json", "tokenizer.json"])
def test_empty_blocks_without_an_end_are_refused(path: str, hub: HubServer, cache: Path) -> None:
    hub.headers[path], hub.endless[path] = {"Content-Encoding": "gzip"}, gzip.compress(b"")[:10]
    hub.repeated = b"\0\0\0\xff\xff"  # a stored block of no bytes
    with raises(InvalidFileError, code="invalid_response"):
        pull()


@pytest.mark.parametrize("path", ["/api/", "config.json", "tokenizer.json"])
def test_a_byte_now_and_then_is_too_slow(
    path: str, hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the slow response has the short limit, so that the others may come late on a busy machine."""
    plan = None if path == "/api/" else estimate_download(NAME)
    hub.endless[path], hub.pause_s = b"{", 0.02
    monkeypatch.setattr(transfer, "_WINDOW_S", 0.3)
    with raises(UnavailableError, code="hub_too_slow"):
        pull() if plan is None else download(plan)


def test_headers_without_an_end_are_too_slow(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_HEAD_S", 0.3)
    hub.endless["/api/"], hub.pause_s, hub.drips_headers = b"", 0.02, True
    with raises(UnavailableError, code="hub_too_slow"):
        pull()
    hub.drips_headers = False


def test_waiting_is_counted_and_limited() -> None:
    pace = transfer.Pace(NAME, max_s=100.0)
    for _ in range(9):
        pace.add(10.0, 10_000)
    assert pace.remaining_s() <= 10.0
    with raises(UnavailableError, code="hub_too_slow", match="more than 100 s"):
        pace.add(10.0, 10_000)
    slow = transfer.Pace(NAME)
    slow.add(19.0, 19)
    with raises(UnavailableError, code="hub_too_slow", match="at least 1000 bytes per second, got 20 bytes"):
        slow.add(1.0, 1)


def test_a_long_pause_is_not_waited_for(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = estimate_download(NAME)
    hub.status, hub.headers = 429, {"/": {"Retry-After": "100000"}}
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    with raises(UnavailableError) as raised:
        download(plan)
    assert raised.value.retry_after_s == 100_000


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://x/y", "http://", "http://[x", "//:99999999/"])
@pytest.mark.parametrize("path", ["/api/", "resolve"])
def test_a_redirect_to_another_protocol_is_refused(path: str, location: str, hub: HubServer, cache: Path) -> None:
    hub.headers[path], hub.status = {"Location": location}, 302 if path == "/api/" else 0  # the hub redirects weights
    with raises((InvalidFileError, UnavailableError)) as raised:
        pull()
    assert raised.value.code in ("invalid_header", "invalid_response", "no_connection")


def test_redirects_end_and_lose_the_token(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.status = 302
    hub.headers["/"] = {"Location": f"http://localhost:{hub.port}/api/models/o/n"}
    with raises(InvalidFileError, code="invalid_header", param="Location"):
        pull()
    assert [("authorization" in map(str.lower, request.headers)) for request in hub.requests[:2]] == [True, False]


def test_another_part_of_a_file_is_fetched_from_its_beginning(hub: HubServer, cache: Path) -> None:
    plan = estimate_download(NAME)
    digest = next(file.digest for file in plan.files if file.name == "model.safetensors")
    plan.blobs.mkdir(parents=True)
    (plan.blobs / f"{digest}.incomplete").write_bytes(b"w" * 100)
    hub.headers["/cdn/"] = {"Content-Range": "bytes 0-1/1000000"}
    assert contents(download(plan)) == FILES


def without_digests(listing: dict[str, Any]) -> object:
    """As mirrors have it that list only names."""
    return listing | {"siblings": [{"rfilename": sibling["rfilename"]} for sibling in listing["siblings"]]}


def test_a_hub_without_digests_is_verified_by_etag(hub: HubServer, cache: Path) -> None:
    hub.edit_listing = without_digests
    plan = estimate_download(NAME)
    assert plan.num_by_etag == 3
    assert "verify  by ETag, as the hub lists no digest (3 of 3 files)" in describe_plan(plan)
    assert plan.total_bytes == sum(map(len, FILES.values()))
    assert contents(download(plan)) == FILES
    hub.corrupt.add("config.json")
    with raises(InvalidFileError, code="wrong_digest"):
        estimate_download(NAME)


@pytest.mark.parametrize("name", ["ETag", "Content-Length", "X-Repo-Commit"])
def test_what_cannot_be_verified_is_refused(name: str, hub: HubServer, cache: Path) -> None:
    hub.edit_listing = without_digests
    hub.headers["HEAD "] = {"ETag": '"5f3e-61a2"'} if name == "ETag" else {}
    if name != "ETag":
        hub.headers["HEAD "] = {"Content-Length": str(1 << 60)} if name == "Content-Length" else {name: "d" * 40}
    with raises(InvalidFileError, code="invalid_header", param=name):
        pull()
    assert not cache.exists()


def test_digests_of_other_kinds_of_hub() -> None:
    digests = [hashlib.md5(b"abc"), hashlib.sha1(b"abc"), hashlib.sha256(b"abc")]  # noqa: S324
    for digest in [*(state.hexdigest() for state in digests), git_digest(b"abc")]:
        content = ContentHash(RemoteFile("x", 3, digest, by_etag=True))
        content.update(b"abc")
        assert content.matches()
    listed = ContentHash(RemoteFile("x", 3, digests[1].hexdigest()))
    listed.update(b"abc")
    assert not listed.matches()


class Counted(str):
    """A string that counts its comparisons."""

    __slots__ = ()
    num = 0

    def __eq__(self, other: object) -> bool:
        Counted.num += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_too_many_files_are_refused_before_the_first(kind: str, hub: HubServer, cache: Path) -> None:
    names = [f"f{number}.{kind}" for number in range(2001)]
    index = json.dumps({"weight_map": {name: name for name in names}}).encode()
    is_sharded = kind == "safetensors"
    files = FILES | ({"model.safetensors.index.json": index} if is_sharded else {})
    hub.add(str(NAME), {name: data for name, data in files.items() if not is_sharded or name != "model.safetensors"})
    added = [{"rfilename": name, "size": 2, "blobId": git_digest(b"{}")} for name in names]
    hub.edit_listing = lambda listing: listing | {"siblings": listing["siblings"] + added}
    with raises(InvalidFileError, code="too_many_files", param="siblings", match=r"2003|2001"):
        pull()
    assert {request.path.rsplit("/")[-1] for request in hub.requests} <= {"main", "model.safetensors.index.json"}
    assert not cache.exists()


def test_many_shards_are_found_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"m{number}.safetensors" for number in range(500)]
    files = ["config.json", "model.safetensors.index.json", *names]
    model = RemoteModel(NAME, "0" * 40, tuple(RemoteFile(Counted(name), 10, "0" * 40) for name in files))
    index = b'{"weight_map": {%s}}' % b",".join(b'"t%d":"m%d.safetensors"' % (number, number) for number in range(500))
    monkeypatch.setattr("penstock.hub.allowed_files.fetch_small", lambda *_: index)
    assert len(choose_files(model)) == len(files)
    assert Counted.num < 40 * len(files)


def test_a_wrong_blob_is_replaced_and_a_wrong_ref_ignored(hub: HubServer, cache: Path) -> None:
    snapshot = pull()
    (snapshot / "tokenizer.json").resolve().write_bytes(b"cut")
    (repository_folder(NAME) / "refs" / "main").write_text("../../../evil")
    assert find_downloaded(NAME) is None
    assert contents(pull()) == FILES
    assert find_downloaded(NAME) == snapshot


@pytest.mark.parametrize("content", [b"w" * 100, b"w" * 500, None], ids=["part", "whole", "none"])
def test_another_pull_of_the_same_file_ended_during_the_wait(
    content: bytes | None, hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It added bytes, and was killed then, or it removed them, because they were wrong."""
    lock, changed = fcntl.flock, set()

    def change_and_lock(stream: IO[bytes], operation: int) -> None:
        part = Path(stream.name)
        if part not in changed and hashlib.sha256(FILES["model.safetensors"]).hexdigest() in part.name:
            changed.add(part)
            if content is None:
                part.unlink()
            else:
                part.write_bytes(content)
        lock(stream, operation)

    monkeypatch.setattr(fcntl, "flock", change_and_lock)
    assert contents(pull()) == FILES
    assert len(changed) == 1


def test_a_cache_without_symbolic_links(hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS", True)
    snapshot = pull()
    assert contents(snapshot) == FILES
    assert not any(path.is_symlink() for path in snapshot.iterdir())
    assert pull() == snapshot


def test_a_pull_sends_no_other_requests(hub: HubServer, cache: Path) -> None:
    commit = pull().name
    starts = ("/api/models/o/n/", f"/o/n/resolve/{commit}/", "/cdn/")
    assert [request.path for request in hub.requests if not request.path.startswith(starts)] == []


def test_a_listed_file_that_is_missing(hub: HubServer, cache: Path) -> None:
    hub.edit_listing = lambda listing: (
        listing | {"siblings": [*listing["siblings"], {"rfilename": "x.json", "size": 2, "blobId": git_digest(b"{}")}]}
    )
    with raises(NotFoundError, code="model_not_found"):
        pull()


def test_bytes_that_are_received_again_are_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes no ranges and breaks every answer does not keep a download for ever."""
    sink, tries = _Bytes(), []

    def break_off(*_: object) -> bool:
        tries.append(sink.tell())
        if len(tries) % 2:
            return False  # it sends no part
        sink.write(b"x" * (1 << 17))
        raise UnavailableError("broken")

    monkeypatch.setattr(transfer, "_receive_part", break_off)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(UnavailableError):
        transfer.receive(NAME, RemoteFile("a", 1 << 20, ""), "http://h", sink)
    assert len(tries) < 50


def test_a_deadline_is_for_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = _Bytes()

    def break_off(*arguments: Any) -> bool:
        sink.write(b"x" * (1 << 17))
        arguments[-1].spend(40.0)
        raise UnavailableError("broken")

    monkeypatch.setattr(transfer, "_receive_part", break_off)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with raises(UnavailableError, code="hub_too_slow", match="more than 100 s"):
        transfer.receive(NAME, RemoteFile("a", 1 << 30, ""), "http://h", sink, 100.0)
    assert len(sink) == 3 << 17


def test_attempts_that_get_no_answer_count_for_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, tries = [0.0], []

    def refuse(*_: object, **__: object) -> object:
        tries.append(now[0])
        now[0] += 40.0
        raise UnavailableError("no connection")

    monkeypatch.setattr(transfer, "open_transfer", refuse)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with raises(UnavailableError, code="hub_too_slow"):
        transfer.receive(NAME, RemoteFile("a", 1 << 30, ""), "http://h", _Bytes(), 50.0)
    assert len(tries) == 2


class _Bytes(bytearray):
    """A sink in memory."""

    def write(self, data: bytes) -> None:
        self += data

    def tell(self) -> int:
        return len(self)

    def restart(self) -> None:
        self.clear()


def test_another_commit_than_the_pinned_one_is_refused() -> None:
    listing = json.dumps({"sha": "1" * 40, "siblings": []}).encode()
    assert decode_listing(ModelName("o/n", "1" * 40), listing).commit == "1" * 40
    with raises(InvalidFileError, param="sha"):
        decode_listing(ModelName("o/n", "0" * 40), listing)
