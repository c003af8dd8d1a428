"""``penstock node`` and ``penstock serve --cluster``: what they refuse before anything starts."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.service import node
from penstock.cluster.placement import ray_setup
from tests.support.command import DEMO
from tests.support.ports import free_port


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef" * 4 + "\n")
    file.chmod(0o600)
    return file


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "--address: required for the head"),
        (["--address", "127.0.0.9"], "--address: expected 127.0.0.1 or an address that other machines reach"),
        (["--address", "::ffff:127.0.0.9"], "--address: expected 127.0.0.9, got ::ffff:127.0.0.9"),
        (["--address", "::1"], "--address: expected 127.0.0.1 or an address that other machines reach"),
        (["--address", "::"], "got ::"),
        (["--address", "head.example"], "--address: expected an IP address, got 'head.example'"),
        (["--address", "8.8.8.8"], "--address: 8.8.8.8 is not private"),
        (["--join", "ray://10.0.0.5"], "--join: expected HOST:PORT, got 'ray://10.0.0.5'"),
        (["--address", "10.0.0.5", "--first-port", "65500"], "--first-port: expected"),
        (["--address", "10.0.0.5", "--cpus", "-1"], "--cpus: expected"),
        (["--address", "10.0.0.5", "--port", "0"], "--port: expected an integer from 1"),
        (["--join", "10.0.0.5:6379", "--port", "6379"], "--port: expected none with --join"),
        (["--address", "10.0.0.5", "--once"], "--once requires --join"),
        (["--address", "192.0.2.7"], "--address: expected an address of this machine, got 192.0.2.7"),
    ],
)
def test_a_node_refuses_wrong_options(token, capsys, options, text) -> None:
    assert main(["node", "--token-file", str(token), *options]) == 2
    assert text in capsys.readouterr().err


def test_a_folder_that_others_can_access_is_refused(token, capsys, tmp_path) -> None:
    """Ray's own folder in it has mode 0777."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o755)
    options = ["--address", "127.0.0.1", "--temp-folder", str(folder)]
    assert main(["node", "--token-file", str(token), *options]) == 2
    assert f"--temp-folder: {folder}: expected a folder of yours" in capsys.readouterr().err
    assert folder.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("option", ["port", "first-port"])
def test_a_node_names_a_port_that_is_in_use(token, capsys, option) -> None:
    """Before Ray starts, whose message is a page long."""
    ports = [free_port() for _ in range(4)]
    while ports[3] != ports[0] + 3:  # the three before the last are free, too
        ports = [*ports[1:], free_port()]
    port = ports[3]
    with socket.create_server(("127.0.0.1", port)):
        chosen = (port, 21_000) if option == "port" else (free_port(), port - 3)
        options = ["--port", str(chosen[0]), "--first-port", str(chosen[1])]
        assert main(["node", "--token-file", str(token), "--address", "127.0.0.1", *options]) == 1
    assert f"penstock: --{option}: 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("once", [[], ["--once"]])
def test_a_node_waits_for_its_head(token, capsys, monkeypatch, once) -> None:
    """It may be started before the head; with --once it says that there is none."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(node.time, "sleep", sleep)
    monkeypatch.setattr(ray_setup, "check_ray", lambda: None)
    head = f"127.0.0.1:{free_port()}"
    before = [signal.getsignal(number) for number in node._SIGNALS]
    try:
        assert main(["node", "--token-file", str(token), "--join", head, *once]) == len(once)
    finally:
        for number, handler in zip(node._SIGNALS, before, strict=True):
            signal.signal(number, handler)
    assert pauses == ([] if once else [1.0, 2.0, 5.0])
    assert f"{head}: the head of the cluster does not answer" in capsys.readouterr().err


def test_a_node_refuses_a_token_that_others_may_read(token, capsys) -> None:
    token.chmod(0o644)
    assert main(["node", "--token-file", str(token), "--address", "10.0.0.5"]) == 1
    assert "token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--cluster", "10.0.0.5:6379"], "--cluster requires --cluster-token-file"),
        (["--cluster-token-file", "TOKEN"], "--cluster-token-file requires --cluster"),
        (["--place-seconds", "30"], "--place-seconds requires --cluster"),
        (["--cluster", "10.0.0.5:6379", "--cluster-token-file", "TOKEN"], "--threads: required with --cluster"),
        (["--cluster", "10.0.0.5", "--cluster-token-file", "TOKEN", "--threads", "1"], "--cluster: expected HOST:PORT"),
        (
            ["--cluster", "10.0.0.5:1", "--cluster-token-file", "TOKEN", "--threads", "1", "--worker-host", "::"],
            "--cluster: expected no --worker-token-file and no --worker-host",
        ),
    ],
)
def test_serve_refuses_wrong_options_of_a_cluster(token, capsys, options, text) -> None:
    words = [str(token) if word == "TOKEN" else word for word in options]
    assert main(["serve", str(DEMO), *words]) == 2
    assert text in capsys.readouterr().err


def test_a_cluster_runs_bundles_only(token, tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = ["--cluster", "10.0.0.5:6379", "--cluster-token-file", str(token), "--threads", "1"]
    assert main(["serve", str(tmp_path), *words]) == 2
    assert "expected a .psm bundle with --cluster" in capsys.readouterr().err
