"""The route /predict of a T5 in a worker process, as in this process, also if the worker is killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, pipeline
from penstock.serving.http.app import make_app
from penstock.serving.http.listener import Listener
from penstock.serving.settings import GatewaySettings
from tests.support.encoders import LIMITS
from tests.support.text_tasks import write_t5
from tests.support.worker_processes import CALM, OPTIONS, faulty, service, wait_for_causes

SPECIAL = [[0], [2]]
SHORT = {"min_new_tokens": 3, "max_new_tokens": 7, "bad_words_ids": SPECIAL}
SEARCH = {"num_beams": 3, "min_new_tokens": 40, "max_new_tokens": 40, "bad_words_ids": SPECIAL}


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=600) as response:  # noqa: S310
        return json.loads(response.read())


def test_a_worker_translates_and_is_killed_in_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is killed at the fifth step of the first search, of which nothing has been sent."""
    wait_for_causes(monkeypatch)
    folder = tmp_path / "t5"
    write_t5(folder)
    with LLM(folder, mode="eager", limits=LIMITS) as llm:
        translate = pipeline("translation_en_to_de", llm)
        expected = [translate("w3 the w4", **options) for options in (SEARCH, SHORT)]
    assert all(one[0]["translation_text"] for one in expected)

    async def main() -> None:
        options = replace(OPTIONS, limits=LIMITS)
        async with service(supervision=CALM, command=faulty("fifth"), options=options) as running:
            backend = await running.models.load(str(folder), "t5")
            gateway = make_app(running.models, GatewaySettings(port=0))
            listener = Listener(gateway, gateway.settings)
            url = listener.open()
            serving = asyncio.ensure_future(listener.serve())
            try:
                for generate, result in zip((SEARCH, SHORT), expected, strict=True):
                    body = {"inputs": "w3 the w4", "parameters": {"generate_parameters": generate}}
                    assert await asyncio.to_thread(post, f"{url}/predict", body) == result
                assert backend.deaths()["signal"] == 1
                assert backend.lost_requests() == {"retried": 1, "continued": 0, "failed": 0}
            finally:
                listener.stop(at_once=True)
                await serving

    asyncio.run(main())
