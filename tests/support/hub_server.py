"""A Hugging Face hub on this machine: the parts of its protocol that downloads use, and its failures."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.command import FOLDER, Run

TOKEN = "hf_right"  # noqa: S105
LARGE = (".safetensors", ".gguf", ".bin")  # the hub keeps these in Git LFS and redirects to a CDN


def demo_files(**changes: object) -> dict[str, bytes]:
    """The files of the demo's checkpoint, with other values in its config.json, and files that must stay behind."""
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    files = {name: (FOLDER / name).read_bytes() for name in names}
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | changes).encode()
    return files | {"README.md": b"# Demo", "modeling_demo.py": b"raise SystemExit", "pytorch_model.bin": b"pickle"}


def git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass
class File:
    data: bytes
    is_large: bool

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest() if self.is_large else git_digest(self.data)

    def listing(self, name: str) -> dict[str, object]:
        entry: dict[str, object] = {"rfilename": name, "size": len(self.data), "blobId": git_digest(self.data)}
        if self.is_large:
            entry["lfs"] = {"sha256": self.digest, "size": len(self.data), "pointerSize": 134}
        return entry


@dataclass
class Repository:
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]


class HubServer:
    """``add`` repositories, set faults, and read ``requests``.  Large files come from another host name, the CDN."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.breaks: dict[str, list[int]] = {}
        """For each file, the bytes after which its next answers break off."""
        self.corrupt: set[str] = set()
        self.short: set[str] = set()
        """Files that arrive with fewer bytes than the listing says."""
        self.lengthen: dict[str, int] = {}
        """Bytes to add to the size of a file in the listing."""
        self.ignores_ranges = False
        self.fails_after_break = False
        """Answer 503 to everything after the first connection that broke off."""
        self.stall_after = 0
        """Bytes of a large file after which the CDN sends nothing more, but keeps the connection."""
        self.status = 0
        """Answer every request with this status."""
        self.headers: dict[str, dict[str, str]] = {}
        """Headers to add, by a part of the path of the requests that get them, and "HEAD " before it for these only."""
        self.edit_listing: Callable[[dict[str, Any]], object] = lambda listing: listing
        """Changes a listing; bytes are sent as they are."""
        self.endless: dict[str, bytes] = {}
        """The beginning of bodies without an end, by a part of the path."""
        self.repeated = b" "
        """What follows the beginning again and again."""
        self.pause_s = 0.0
        """Seconds between two bytes of what is endless, or between two of its headers."""
        self.drips_headers = False
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, name: str, files: dict[str, bytes], ref: str = "main", *, gated: bool = False) -> str:
        """Commit files to a branch of a repository; return the commit."""
        repository = self.repositories.setdefault(name, Repository())
        repository.gated = gated
        contents = {path: File(data, path.endswith(LARGE)) for path, data in files.items()}
        text = json.dumps({path: file.digest for path, file in contents.items()})
        commit = hashlib.sha1(f"{name}{text}".encode(), usedforsecurity=False).hexdigest()
        repository.commits[commit] = contents
        repository.refs[ref] = commit
        return commit

    def gets(self, name: str) -> list[Request]:
        """The requests for the contents of a file, on the hub and on the CDN."""
        return [one for one in self.requests if one.method == "GET" and one.path.endswith(f"/{name}")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server_hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(Request(self.command, path, dict(self.headers)))
        if hub.status:
            self._refuse(hub.status)
            return
        if any(part in path for part in hub.endless):
            self._send_without_end(next(data for part, data in hub.endless.items() if part in path))
            return
        parts = path.strip("/").split("/")
        if parts[0] == "cdn":
            self._send_cdn(parts[1], "/".join(parts[2:]))
        elif parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._send_info("/".join(parts[2:4]), "/".join(parts[5:]) or "main")
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._send_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._refuse(404)

    def _refuse(self, status: int, code: str = "", message: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, b"", {name: value for name, value in headers.items() if value})

    def _begin(self, status: int, num_bytes: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        request = f"{self.command} {unquote(urlsplit(self.path).path)}"
        for part, more in self.server_hub.headers.items():
            if part in request:
                headers = {**headers, **more}
        for name, value in {"Content-Length": str(num_bytes), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_without_end(self, beginning: bytes) -> None:
        """Send bytes until the other side closes the connection."""
        pause_s = self.server_hub.pause_s
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while self.server_hub.drips_headers:
                self.wfile.write(b"X-Header: x\r\n")
                time.sleep(pause_s)
            for part, more in self.server_hub.headers.items():
                if part in self.path:
                    self.wfile.write("".join(f"{name}: {value}\r\n" for name, value in more.items()).encode())
            self.wfile.write(b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + beginning)
            while True:
                self.wfile.write(self.server_hub.repeated * (1 if pause_s else 64 << 10))
                time.sleep(pause_s)

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self._begin(status, len(data), headers)
        if self.command == "GET":
            self.wfile.write(data)

    def _find(self, name: str, revision: str) -> tuple[Repository, str] | None:
        repository = self.server_hub.repositories.get(name)
        if repository is None:
            self._refuse(401, message="Invalid username or password.")  # as the hub does, which hides private ones
            return None
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
            return None
        return repository, commit

    def _send_info(self, name: str, revision: str) -> None:
        if (found := self._find(name, revision)) is None:
            return
        repository, commit = found
        siblings = [file.listing(path) for path, file in repository.commits[commit].items()]
        for sibling in siblings:
            extra = self.server_hub.lengthen.get(str(sibling["rfilename"]), 0)
            sibling["size"] = int(str(sibling["size"])) + extra
        body = {"id": name, "modelId": name, "sha": commit, "gated": repository.gated, "siblings": siblings}
        edited = self.server_hub.edit_listing(body)
        data = edited if isinstance(edited, bytes) else json.dumps(edited).encode()
        self._send(200, data, {"Content-Type": "application/json"})

    def _send_file(self, name: str, revision: str, path: str) -> None:
        if (found := self._find(name, revision)) is None:
            return
        repository, commit = found
        if repository.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "GatedRepo", "Access to this model is restricted.")
            return
        file = repository.commits[commit].get(path)
        if file is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not file.is_large:
            self._send_content(path, file.data, {**headers, "ETag": f'"{file.digest}"'})
            return
        headers |= {
            "Location": f"http://localhost:{self.server_hub.port}/cdn/{file.digest}/{path}",
            "X-Linked-Etag": f'"{file.digest}"',
            "X-Linked-Size": str(len(file.data)),
        }
        self._send(302, b"", headers)

    def _send_cdn(self, digest: str, name: str) -> None:
        for repository in self.server_hub.repositories.values():
            for files in repository.commits.values():
                file = files.get(name)
                if file is not None and file.digest == digest:
                    self._send_content(name, file.data, {"ETag": f'"{digest}"'})
                    return
        self._refuse(403)

    def _send_content(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        hub = self.server_hub
        if name in hub.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if name in hub.short:
            data = data[:-7]
        start, status = 0, 200
        wanted = self.headers.get("Range", "")
        if wanted.startswith("bytes=") and not hub.ignores_ranges:
            start, status = int(wanted[6:].partition("-")[0]), 206
            if start >= len(data):
                self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            headers = {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        data = data[start:]
        breaks = hub.breaks.get(name)
        if self.command == "GET" and breaks:
            self._begin(status, len(data), headers)
            self.wfile.write(data[: breaks.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            if hub.fails_after_break:
                hub.fails_after_break, hub.status = False, 503
            return
        if self.command == "GET" and hub.stall_after and len(data) > hub.stall_after:
            self._begin(status, len(data), headers)
            for begin in range(0, len(data), hub.stall_after):
                self.wfile.write(data[begin : begin + hub.stall_after])
                self.wfile.flush()
                while hub.stall_after:
                    time.sleep(0.01)
            return
        self._send(status, data, headers)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """An empty hub."""
    server = HubServer()
    yield server
    server.close()


@pytest.fixture
def hub_command(hub: HubServer, penstock_command: Run, tmp_path: Path) -> Run:
    """Runs ``penstock ARGS`` against the hub, with a cache of its own in ``tmp_path / "hf"``."""
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
    settings["PENSTOCK_CACHE_DIR"] = str(tmp_path / "cache")

    def run(*args: object, **options: str) -> subprocess.CompletedProcess[str]:
        return penstock_command(*args, **{**settings, **options})

    return run
