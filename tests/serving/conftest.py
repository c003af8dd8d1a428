"""Fake models for the parts of the service that need no real one, and services over them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from penstock.engine.llm import LLM
from penstock.serving.settings import DoorSettings
from penstock.serving.traces import Traces
from tests.cli.conftest import DEMO
from tests.engine.conftest import FILES, make_llm
from tests.serving.service import Service

__all__ = ["make_llm"]

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CHAT_FILES = FILES | {"tokenizer_config.json": json.dumps({"bos_token": "<s>", "chat_template": TEMPLATE}).encode()}


@pytest.fixture
def serve(make_llm):
    """Services over fake models, which have a template; each is closed at the end."""
    made: list[Service] = []

    def start(
        *names: str, settings: DoorSettings | None = None, traces: Traces | None = None, **sizes: object
    ) -> Service:
        llms = {name: make_llm(files=CHAT_FILES, **sizes) for name in names or ("fake",)}
        made.append(Service(llms, settings, traces))
        return made[-1]

    yield start
    for service in made:
        service.close()


@pytest.fixture(scope="module")
def demo() -> Iterator[Service]:
    """A service over the demo bundle."""
    service = Service({"demo": LLM(DEMO)})
    yield service
    service.close()
