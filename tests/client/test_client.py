"""penstock.Client and AsyncClient over HTTP: routes, streams, cancellation, retries, bounds."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import threading
from contextlib import closing
from typing import BinaryIO
from urllib.parse import unquote

import pytest

from penstock import LLM, AsyncClient, Client, SamplingParams, ServiceError
from penstock.errors import InvalidArgumentError
from penstock.serving.settings import GatewaySettings
from tests.support.command import DEMO
from tests.support.errors import raises
from tests.support.http_service import ENDLESS, ROOMY, is_idle, num_connections, until
from tests.support.waiting import eventually

PROMPT = "def add(a, b):"
GREEDY = {"temperature": 0, "max_tokens": 12}
KEY = "a-key-of-twenty-chars"
BODY = b'{"object": "list", "data": []}'
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
TOLD = b'{"error": {"message": "busy", "code": "c"}}'
BUSY = b"HTTP/1.1 %%d X\r\nretry-after: 0\r\ncontent-length: %d\r\n\r\n%s" % (len(TOLD), TOLD)
EVENT = b'data: {"choices": [{"text": "x"}]}\n\n'
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM += b"%x\r\n%s\r\n" % (len(EVENT), EVENT)


@pytest.fixture(scope="module")
def text():
    with LLM(DEMO) as llm:
        return llm.generate(PROMPT, SamplingParams(**GREEDY)).text


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Retry at once; another test checks the length of pauses."""
    monkeypatch.setattr("penstock.client.retries.MAX_PAUSE_S", 0.0)


def read_request(stream: BinaryIO) -> bytes:
    """Return the bytes of the next request; empty at the end of the connection."""
    head = b""
    while (line := stream.readline()) and line != b"\r\n":
        head += line
    length = re.search(rb"(?i)content-length: *([0-9]+)", head)
    return head + line + (stream.read(int(length[1])) if length else b"")


class Script:
    """A server that answers each request with the next line of a script; b"" closes the connection."""

    def __init__(self, *answers: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.num_asked = self.num_connections = 0
        self.hangs_up = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self.answers:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rb") as stream:
                self.num_connections += 1
                while self.answers and (request := read_request(stream)):
                    self.requests.append(request)
                    self.num_asked += 1
                    answer = self.answers.pop(0)
                    connection.sendall(answer)
                    if not answer or answer is STREAM or self.hangs_up:
                        break

    def close(self) -> None:
        self.answers.clear()
        with closing(socket.create_connection(self._listener.getsockname())):
            pass
        self._thread.join(600)
        self._listener.close()


@pytest.fixture
def script():
    made: list[Script] = []

    def start(*answers: bytes) -> Script:
        made.append(Script(*answers))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_client_calls_every_route(demo, text):
    with Client(demo.url) as client:
        assert [one["id"] for one in client.models()] == ["demo"]
        assert client.model("demo")["scheme"] == client.models()[0]["scheme"]
        assert client.status()["models"][0]["id"] == "demo"
        assert client.complete(PROMPT, **GREEDY)["choices"][0]["text"] == text
        pieces = list(client.stream_complete(PROMPT, **GREEDY))
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == text
        ids = client.tokenize(PROMPT)
        assert client.detokenize(ids) == PROMPT
        assert client.complete(ids, model="demo", **GREEDY)["choices"][0]["text"] == text
        assert len(client.embed([PROMPT, "x"])) == 2
        with raises(ServiceError, param="messages") as caught:
            client.chat([{"role": "user", "content": "x"}])
        assert caught.value.status == 400
        assert num_connections(demo) == 1


def test_async_client_calls_every_route(demo, serve, text):
    fake = serve("fake")

    async def main() -> None:
        async with AsyncClient(demo.url + "/v1/") as client:
            assert [one["id"] for one in await client.models()] == ["demo"]
            several = await asyncio.gather(*(client.complete(PROMPT, **GREEDY) for _ in range(4)))
            assert [one["choices"][0]["text"] for one in several] == [text] * 4
            pieces = [piece async for piece in client.stream_complete(PROMPT, **GREEDY)]
            assert "".join(piece["choices"][0]["text"] for piece in pieces) == text
            assert await client.detokenize(await client.tokenize(PROMPT)) == PROMPT
            assert len(await client.embed([PROMPT, "x"])) == 2
            assert (await client.status())["models"][0]["id"] == "demo"
        messages = [{"role": "user", "content": "the cat"}]
        async with AsyncClient(fake.url) as client:
            whole = await client.chat(messages, max_tokens=9, seed=1, temperature=1)
            pieces = [p async for p in client.stream_chat(messages, max_tokens=9, seed=1, temperature=1)]
            streamed = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
            assert streamed == whole["choices"][0]["message"]["content"]

    asyncio.run(main())


def test_leaving_a_stream_ends_its_request(serve):
    service = serve(**ROOMY)
    with Client(service.url) as client:
        for _ in client.stream_complete(**ENDLESS):
            break
        until(lambda: is_idle(service))

    async def main() -> None:
        async with AsyncClient(service.url) as client:
            stream = client.stream_complete(**ENDLESS)
            await anext(stream)
            await stream.aclose()
            task = asyncio.create_task(client.complete(**ENDLESS))
            await eventually(lambda: service.num_open != 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    until(lambda: is_idle(service) and num_connections(service) == 0)


def test_errors_have_status_code_and_param(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    service = serve(settings=GatewaySettings(keys_file=keys))
    with Client(service.url) as client, pytest.raises(ServiceError) as caught:
        client.models()
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    with Client(service.url, api_key=KEY) as client:
        with pytest.raises(ServiceError) as caught:
            client.complete("x", temperature=-1)
        assert (caught.value.status, caught.value.param) == (400, "temperature")
        assert caught.value.request_id
        with pytest.raises(ServiceError) as caught:
            list(client.stream_complete(**ENDLESS | {"max_tokens": 100, "timeout": 0.001}))
        assert caught.value.code == "deadline_exceeded"


@pytest.mark.parametrize("status", [408, 429, 503])
def test_retriable_statuses_are_retried(script, status):
    server = script(BUSY % status, BUSY % status, OK)
    with Client(server.url) as client:
        assert client.models() == []
    assert server.num_asked == 3
    again = script(BUSY % status, BUSY % status, OK)
    with Client(again.url, retries=1) as client, pytest.raises(ServiceError) as caught:
        client.models()
    assert (caught.value.status, again.num_asked) == (status, 2)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500, 504])
def test_other_statuses_are_not_retried(script, status):
    server = script(BUSY % status, OK)
    with Client(server.url) as client, pytest.raises(ServiceError) as caught:
        client.models()
    assert (caught.value.status, server.num_asked) == (status, 1)


def test_connection_lost_before_response_is_retried(script):
    server = script(b"", OK, b"", OK)
    with Client(server.url) as client:
        assert client.models() == []

    async def main() -> None:
        async with AsyncClient(server.url) as client:
            assert await client.models() == []

    asyncio.run(main())
    assert server.num_asked == 4


def test_stream_is_not_retried_after_its_first_event(script):
    server = script(STREAM, OK)
    with Client(server.url) as client:
        stream = client.stream_complete("x")
        assert next(stream)["choices"][0]["text"] == "x"
        with pytest.raises(ServiceError) as caught:
            next(stream)
    assert (caught.value.status, server.num_asked) == (0, 1)


ENDS = {
    "in a chunk": STREAM[:-4],
    "before the last event": STREAM + b"0\r\n\r\n",
    "no event": STREAM + b"5\r\nx: \n\n\r\n0\r\n\r\n",
    "no HTTP": b"SMTP ready\r\n",
    "an error": STREAM + b"%x\r\n%s\r\n" % (len(TOLD) + 8, b"data: " + TOLD + b"\n\n"),
}


@pytest.mark.parametrize("end", ENDS)
def test_broken_streams_raise_in_both_clients(script, end):
    found = []
    server = script(ENDS[end], ENDS[end])
    server.hangs_up = True

    async def main() -> None:
        async with AsyncClient(server.url, retries=0) as client:
            async for event in client.stream_complete("x"):
                found.append(event["choices"][0]["text"])

    for read in (
        lambda: [found.append(one["choices"][0]["text"]) for one in client.stream_complete("x")],
        lambda: asyncio.run(main()),
    ):
        with Client(server.url, retries=0) as client, pytest.raises(ServiceError) as caught:
            read()
        assert caught.value.status == (200 if end == "an error" else 0)
    assert found == ([] if end in ("in a chunk", "no HTTP") else ["x", "x"])
    assert server.num_asked == 2


def test_refused_stream_is_retried(script):
    whole = STREAM + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    server = script(BUSY % 503, whole, BUSY % 429, whole)

    async def main() -> list[str]:
        async with AsyncClient(server.url) as client:
            return [one["choices"][0]["text"] async for one in client.stream_complete("x")]

    with Client(server.url) as client:
        assert [one["choices"][0]["text"] for one in client.stream_complete("x")] == ["x"]
    assert asyncio.run(main()) == ["x"]
    assert server.num_asked == 4


@pytest.mark.parametrize("stream", [False, True])
def test_timeout_is_not_retried(stream):
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"

        async def main() -> None:
            async with AsyncClient(url, timeout_s=0.2) as client:
                if stream:
                    await anext(client.stream_complete("x"))
                await client.complete("x")

        with Client(url, timeout_s=0.2) as client, raises(ServiceError, match=r"0\.2 s"):
            next(client.stream_complete("x")) if stream else client.complete("x")
        with raises(ServiceError, match=r"0\.2 s"):
            asyncio.run(main())
        silent.setblocking(False)
        for _ in range(2):
            silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_closed_keep_alive_connection_is_replaced(serve):
    service = serve()
    with Client(service.url, retries=0) as client:
        client.models()
        for one in service.listener.connections.copy():  # the service drops them meanwhile
            service.loop.call_soon_threadsafe(one.transport.close)
        until(lambda: num_connections(service) == 0)
        assert client.models()[0]["id"] == "fake"


def test_redirects_are_not_followed(script):
    other = script(OK)
    moved = b"HTTP/1.1 307 X\r\nlocation: %s/v1/models\r\ncontent-length: 0\r\n\r\n" % other.url.encode()
    with Client(script(moved).url, api_key=KEY) as client, pytest.raises(ServiceError) as caught:
        client.models()
    assert (caught.value.status, other.num_asked) == (307, 0)


def test_cookies_and_proxies_are_ignored(script, monkeypatch):
    proxy = script(OK)
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy.url)
    server = script(OK.replace(b"content-type", b"set-cookie: a=b\r\ncontent-type"), OK, OK, OK)

    async def main() -> None:
        async with AsyncClient(server.url) as client:
            assert await client.models() == await client.models() == []

    with Client(server.url) as client:
        assert client.models() == client.models() == []
    asyncio.run(main())
    assert (proxy.num_asked, server.num_connections) == (0, 2)
    for request in server.requests:
        head = request.lower()
        assert b"cookie" not in head
        assert b"accept-encoding: identity" in head


@pytest.mark.parametrize("line", [b"x: " + b"a" * 200_000, b"x: a\r\n" * 30_000])
def test_response_headers_are_bounded(script, line):
    server = script(OK.replace(b"content-type", line + b"\r\ncontent-type"))
    server.hangs_up = True
    with Client(server.url, retries=0) as client, pytest.raises(ServiceError) as caught:
        client.models()
    assert caught.value.status == 0


def test_response_bodies_are_bounded(script, monkeypatch):
    monkeypatch.setattr("penstock.client.http_messages.MAX_RESPONSE_BYTES", 20)
    server = script(OK, STREAM)
    with Client(server.url, retries=0) as client:
        with pytest.raises(ServiceError, match="exceeds"):
            client.models()
        with pytest.raises(ServiceError, match="exceeds"):
            list(client.stream_complete("x"))


@pytest.mark.parametrize("name", [".", "..", "a/../b", "a%2Fb?c#d"])
def test_names_stay_one_segment_of_a_path(script, name):
    server = script(OK)
    with Client(server.url + "/prefix") as client:
        client.model(name)
    path = server.requests[0].split(b" ")[1].decode()
    assert path.startswith("/prefix/v1/models/")
    assert path.count("/") == 4
    assert unquote(path.rpartition("/")[2]) == name


def test_httpx_is_imported_with_the_first_request():
    code = "import sys, penstock; penstock.Client(); penstock.AsyncClient(); assert 'httpx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pauses_grow_and_heed_retry_after(monkeypatch):
    from penstock.client.address import Address
    from penstock.client.retries import Retries

    monkeypatch.setattr("penstock.client.retries.MAX_PAUSE_S", 30.0)
    retries = Retries(Address("http://localhost", retries=8))
    pauses = [retries.pause_s(ServiceError("busy", 503)) for _ in range(7)]
    for number, pause in enumerate(pauses):
        assert min(30, 0.5 * 2**number) <= pause <= min(30, 0.75 * 2**number)
    assert 20 <= Retries(Address("http://localhost")).pause_s(ServiceError("busy", 429, retry_after_s=20)) <= 30


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://x", "http://", "http://x:99999", "http://u:p@x", "http://x?y"]
)
def test_invalid_urls_are_refused(url):
    with raises(InvalidArgumentError, param="url"):
        Client(url)


@pytest.mark.parametrize("option", [{"retries": "a"}, {"retries": 1.5}, {"timeout_s": "x"}, {"timeout_s": True}])
def test_options_of_another_type_are_refused(option):
    with raises(InvalidArgumentError, param=next(iter(option))):
        Client("http://localhost", **option)


def test_refused_connection_has_status_0():
    with closing(socket.socket()) as taken:  # nobody else gets the port meanwhile, and nobody listens
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ServiceError) as caught:
            Client(f"http://127.0.0.1:{taken.getsockname()[1]}", retries=1).models()
    assert caught.value.status == 0
    with raises(InvalidArgumentError, param="api_key"):
        Client(api_key="two words")
