"""What a user does on the service's page, for tests in a browser."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

__all__ = ["ask", "kept_answer", "sent", "slow_down"]


def ask(page: Any, text: str) -> None:
    """Type a message and send it."""
    page.fill("#prompt", text)
    page.locator("#send:enabled").wait_for()  # the page knows its models
    page.press("#prompt", "Enter")


def sent(page: Any, act: Callable[[], None]) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of what the page asks for when something is done."""
    with page.expect_request(lambda r: r.method == "POST") as caught:
        act()
    return caught.value.url.partition("/v1/")[2], json.loads(caught.value.post_data)


def kept_answer(page: Any) -> str:
    """Return the text of the newest answer that the page keeps in the browser."""
    text: str = page.evaluate(
        """() => new Promise((resolve) => {
            indexedDB.open("penstock").onsuccess = ({target: {result: database}}) => {
                const all = database.transaction("conversations").objectStore("conversations").getAll();
                all.onsuccess = () => {
                    const turns = all.result.flatMap((one) => Object.values(one.turns));
                    const answers = turns.filter(({role}) => role === "assistant");
                    resolve(answers.sort((a, b) => a.created - b.created).at(-1).text);
                    database.close();
                };
            };
        })"""
    )
    return text


def slow_down(service: Any, name: str = "fake") -> None:
    """Let each of a model's steps take long enough for a person."""
    program = service.llms[name].engine.program
    run = program.run

    def slowly(*args: Any) -> Any:
        time.sleep(0.02)
        return run(*args)

    program.run = slowly
