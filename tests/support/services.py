"""Fake models for the parts of the service that need no real one, and services over them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.graph.export import export_bundle
from penstock.llm.llm import LLM
from penstock.serving.settings import GatewaySettings
from penstock.serving.traces import Traces
from tests.support.command import DEMO
from tests.support.fake_model import FILES, later, llms_over_fakes, make_llm
from tests.support.http_service import KEY, Service
from tests.support.invariant_checkpoints import write_checkpoint
from tests.support.worker_processes import OPTIONS, SEEDED
from tests.system_packages import skip_reason

__all__ = ["later", "make_llm"]

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CHAT_FILES = FILES | {"tokenizer_config.json": json.dumps({"bos_token": "<s>", "chat_template": TEMPLATE}).encode()}


@pytest.fixture
def serve(make_llm):
    """Services over fake models, which have a template; each is closed at the end."""
    made: list[Service] = []

    def start(
        *names: str, settings: GatewaySettings | None = None, traces: Traces | None = None, **sizes: object
    ) -> Service:
        llms = {name: make_llm(files=CHAT_FILES, **sizes) for name in names or ("fake",)}
        made.append(Service(llms, settings, traces))
        return made[-1]

    yield start
    for service in made:
        service.close()


@pytest.fixture(scope="module")
def fake() -> Iterator[Service]:
    """A service over a fake model with a template, for the tests of a file that leave it as it was."""
    with llms_over_fakes() as make:
        service = Service({"fake": make(files=CHAT_FILES)})
        yield service
        service.close()


@pytest.fixture
def locked_grpc(serve, tmp_path):
    """A service with a gRPC gateway, which wants KEY."""
    file = tmp_path / "keys"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    return serve(settings=GatewaySettings(grpc_port=0, keys_file=file))


@pytest.fixture(scope="module")
def demo() -> Iterator[Service]:
    """A service over the demo bundle."""
    service = Service({"demo": LLM(DEMO)})
    yield service
    service.close()


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two bundles of other weights, with the same vocabulary."""
    folder = tmp_path_factory.mktemp("versions")
    made = []
    for index, width in enumerate((200, 232)):
        checkpoint = write_checkpoint(folder / f"checkpoint{index}", intermediate_size=width)
        made.append(folder / f"v{index}.psm")
        export_bundle(checkpoint, made[-1], scheme="w8a8")
    return made


@pytest.fixture(scope="session")
def expected(versions: list[Path]) -> list[dict[int, list[int]]]:
    """What each version answers to a prompt that begins with a number."""
    found = []
    for path in versions:
        with LLM(path, limits=OPTIONS.limits) as llm:
            results = llm.generate([[number, 7, 9] for number in range(32)], SEEDED)
            found.append({number: result.token_ids for number, result in enumerate(results)})
    assert all(found[0][number] != found[1][number] for number in range(32))
    return found


def make_certificate(folder: Path, address: str = "127.0.0.1") -> tuple[Path, Path]:
    """A certificate for localhost and an address that signs itself, and its key."""
    if reason := skip_reason("openssl"):
        pytest.skip(reason)
    names = ["-subj", "/CN=localhost", "-addext", f"subjectAltName=DNS:localhost,IP:{address}"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", *names, "-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "certificate.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other_certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Another one."""
    return make_certificate(tmp_path_factory.mktemp("tls"))
