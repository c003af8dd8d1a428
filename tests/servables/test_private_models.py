"""Language models that servables use by name: not served, served, and unloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidFileError, NotFoundError, UnavailableError
from penstock.serving.workers.private_models import PrivateModels
from tests.support.servable_folders import ask, run, serving, write

STORY = """
    beside = servable.language_model(served="demo")

    @servable.method(inputs={"prompt": "TEXT[]"}, outputs={"text": "TEXT[]"})
    def complete(prompt):
        return beside(prompt)
"""


class Named:
    """A language model of which nothing but its name is asked."""

    is_ready = True

    def __init__(self, name: str) -> None:
        self.name = name


class Shelf:
    """Models that are served, by name."""

    def __init__(self, *names: str) -> None:
        self.names = [*names]

    def list(self) -> list[Named]:
        return [Named(name) for name in self.names]

    def get(self, name: str) -> Named:
        if name not in self.names:
            raise NotFoundError(f"no model {name!r} here")
        return Named(name)


def hidden(shelf: Shelf) -> PrivateModels:
    models: Any = shelf
    return PrivateModels(models, lambda *_: pytest.fail("nothing else is opened"))


@pytest.mark.parametrize(("names", "there"), [((), "none"), (("other", "third"), "other, third")])
def test_unserved_model_is_named_with_its_servable(tmp_path: Path, names: tuple[str, ...], there: str) -> None:
    write(tmp_path, "story", STORY)

    async def work() -> None:
        async with serving(tmp_path, languages=hidden(Shelf(*names))):
            pass

    with pytest.raises(InvalidFileError, match=rf"^story: servable\.py .*'demo', .*: {there}$"):
        run(work)


def test_unloaded_model_makes_the_servable_not_ready(tmp_path: Path) -> None:
    write(tmp_path, "story", STORY)
    shelf = Shelf("demo")

    async def work() -> None:
        async with serving(tmp_path, languages=hidden(shelf)) as servables:
            assert servables.find("story").is_ready
            shelf.names.clear()
            assert not servables.find("story").is_ready
            with pytest.raises(UnavailableError, match=r"^story: .*'demo'"):
                await ask(servables, "story", {"prompt": np.array(["a"])})

    run(work)
