"""Takes the deliveries of an EngineThread."""

from __future__ import annotations

import threading

from penstock.llm.engine_thread import StepEvent


class Inbox:
    """Takes deliveries; ``wait_for`` blocks until a condition over them holds."""

    def __init__(self) -> None:
        self.calls: list[list[StepEvent]] = []
        self._changed = threading.Condition()

    def __call__(self, events: list[StepEvent]) -> None:
        with self._changed:
            self.calls.append(events)
            self._changed.notify_all()

    @property
    def events(self) -> list[StepEvent]:
        return [one for call in self.calls for one in call]

    def of(self, key: int) -> list[StepEvent]:
        return [one for one in self.events if one.key == key]

    def wait_for(self, condition, seconds: float = 600.0) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, seconds), "it did not come true"

    def wait_last(self, *keys: int) -> None:
        self.wait_for(lambda: all(any(one.is_last for one in self.of(key)) for key in keys))
