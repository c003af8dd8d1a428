"""What commands that join another machine print when they have to try again."""

import asyncio
import socket
import ssl

import pytest

from penstock.processes.reconnect import RetryLines, connection_problem
from penstock.processes.tls import connect


def test_repeated_reasons_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = RetryLines("stage", "big:9100", (0.5, 2.0))
    assert [lines.next_pause_s(reason) for reason in ("refused", "refused", "refused", "lost", "")] == [0.5, *[2.0] * 4]
    assert capsys.readouterr().err.splitlines() == [
        "penstock stage: big:9100: refused; trying again in 0.5 s",
        "penstock stage: big:9100: refused; trying again every 2 s",
        "penstock stage: big:9100: lost; trying again every 2 s",
    ]
    lines.reset()
    assert lines.next_pause_s("refused") == 0.5
    assert capsys.readouterr().err == "penstock stage: big:9100: refused; trying again in 0.5 s\n"


def test_a_port_without_a_listener_is_named_in_words() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # it does not listen
        with pytest.raises(ConnectionRefusedError) as refused:
            asyncio.run(connect(*bound.getsockname(), 5.0))
    assert connection_problem(refused.value, 5.0) == "Connection refused"


def test_other_problems_are_named_in_words() -> None:
    untrusted = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    untrusted.verify_message = "self-signed certificate"
    assert connection_problem(untrusted, 5.0) == "its certificate is not trusted: self-signed certificate"
    assert connection_problem(TimeoutError(), 5.0) == "no answer within 5 s"
    assert connection_problem(socket.gaierror(-2, "Name or service not known"), 5.0) == "Name or service not known"
    assert connection_problem(ConnectionResetError("the peer closed it"), 5.0) == "the peer closed it"
