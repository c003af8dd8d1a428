"""``penstock``'s names are those of ``__all__``, sorted, importable, and nothing else; importing it is cheap."""

from __future__ import annotations

import subprocess
import sys

import penstock


def test_all_is_sorted_and_importable() -> None:
    assert list(penstock.__all__) == sorted(penstock.__all__)
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None


def test_dir_lists_exactly_all() -> None:
    assert sorted(name for name in dir(penstock) if not name.startswith("_")) == sorted(
        name for name in penstock.__all__ if not name.startswith("_")
    )


def test_import_is_lazy() -> None:
    """``import penstock`` loads no package that takes long to load."""
    heavy = ("torch", "numpy", "tokenizers", "jinja2", "grpc")
    script = f"import sys, penstock; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
