"""A class has a name of its own, in a list that may only shrink; docstrings begin as the style guide says."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "penstock"

FAMILY_CLASSES = {"Config", "Network", "_Attention", "_Experts", "_Layer", "_MLP", "_Mixture"}
"""Classes that a family's file has by convention.  The model_type tells them apart."""

SHARED_NAMES = {
    "Context",  # penstock.lite and the handle of ps_context
    "Embedding",  # the layer and the result of a request
    "Model",  # penstock.lite, a servable's declaration, and the handle of ps_model
    "Module",  # penstock.symbolic stands in for torch.nn
    "Tensor",  # penstock.lite, penstock.tensors, and a network before it is lowered
}
"""Names of the public API or the C API that a second module has too."""


def test_a_class_name_is_defined_once() -> None:
    modules: defaultdict[str, set[str]] = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        for name in re.findall(r"^ *class (\w+)[(:]", path.read_text(), re.MULTILINE):
            modules[name].add(str(path.relative_to(SOURCE)))
    repeated = {name for name, places in modules.items() if len(places) > 1}
    families = {name for name in repeated if all(place.startswith("models/") for place in modules[name])}
    assert repeated - (families & FAMILY_CLASSES) == SHARED_NAMES


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """The style guide: an imperative, or a noun phrase with its article."""
    begins = re.compile(r'^ *"""(?:What|Of|Who|Whoever|Nobody|Where)\b', re.MULTILINE)
    found = [
        f"{path.relative_to(SOURCE)}: {match[0].strip()}"
        for path in SOURCE.rglob("*.py")
        for match in begins.finditer(path.read_text())
    ]
    assert not found
