"""The JSON-Schema test suite, draft 2020-12, beside our grammars and beside jsonschema, whose sources carry it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.text.grammar.compiler import Grammar
from penstock.text.grammar.source import GrammarSource, schema_text
from tests.support.byte_vocabulary import allows, byte_compiler, random_text

DRAFT = "json/tests/draft2020-12/"
KNOWN: dict[str, set[str]] = {
    "format.json": {"valid refused"},  # a format is enforced, even without the vocabulary that says so
    "optional/format/date-time.json": {"valid refused"},  # leap seconds, which programs that read dates refuse
    "optional/format/time.json": {"valid refused"},
    "optional/format/email.json": {"valid refused"},  # quoted names, and addresses instead of hosts
    "optional/format/ipv6.json": {"valid refused"},  # its last part in the form of IPv4
    "optional/ecmascript-regex.json": {"valid refused", "invalid allowed"},  # \s has no U+FEFF; Python's \W differs
}
"""Where the grammars allow less or more than the suite."""
IN_REFERENCES = {"$dynamicAnchor", "schema is false"}
ACCEPTED = 210


def suite_of(folder: Path) -> Path | None:
    """Return the folder of the suite from the sources of jsonschema; None if PyPI cannot be reached."""
    release = version("jsonschema")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
    command += ["--retries", "0", "--timeout", "10", "--dest", str(folder), f"jsonschema=={release}"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return None
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        members = [member for member in opened if f"/{DRAFT}" in member.name and member.isfile()]
        opened.extractall(folder, members, filter="data")
    return next(folder.glob(f"*/{DRAFT}"))


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, Any]]]:
    folder = suite_of(tmp_path_factory.mktemp("suite"))
    if folder is None:
        pytest.skip("test_schema_suite: PyPI cannot be reached")
    files = sorted(folder.rglob("*.json"))
    groups = [(str(file.relative_to(folder)), group) for file in files for group in json.loads(file.read_bytes())]
    return [(name, group) for name, group in groups if isinstance(group["schema"], dict)]


def spellings(value: Any) -> Iterator[str]:
    """Yield a value with its properties in every order, because a grammar has the order of its schema."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        for parts in product(*(list(islice(spellings(one), 50)) for one in value)):
            yield f"[{', '.join(parts)}]"
    elif isinstance(value, dict):
        items = [
            [f"{json.dumps(key, ensure_ascii=False)}: {one}" for one in islice(spellings(value[key]), 50)]
            for key in value
        ]
        for order in permutations(items):
            for parts in product(*order):
                yield f"{{{', '.join(parts)}}}"
    else:
        yield json.dumps(value, ensure_ascii=False)


def faults_of(grammar: Grammar, group: dict[str, Any], rng: random.Random) -> set[str]:
    """Return how a grammar differs from its schema: what it allows and refuses of the suite, and writes itself."""
    faults = set()
    for test in group["tests"]:
        if any(allows(grammar, text) for text in islice(spellings(test["data"]), 1000)) != test["valid"]:
            faults.add("valid refused" if test["valid"] else "invalid allowed")
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(group["schema"], format_checker=checker)
    for text in filter(None, (random_text(grammar, rng) for _ in range(6))):
        if "\\p{" not in json.dumps(group["schema"]) and not validator.is_valid(json.loads(text)):
            faults.add("invalid allowed")
    return faults


@pytest.mark.long
def test_grammars_agree_with_the_suite(suite: list[tuple[str, dict[str, Any]]]) -> None:
    """A schema is refused by its keyword, or its grammar allows the valid texts and no other."""
    compiler, rng, counts, wrong = byte_compiler(), random.Random(1), Counter[str](), []
    for name, group in suite:
        text = schema_text("json_schema", group["schema"])
        assert text is not None
        try:
            grammar = compiler.compile(GrammarSource("json_schema", text))
        except (InvalidArgumentError, UnsupportedError) as error:
            counts["refused"] += 1
            words = keywords(group["schema"]) | IN_REFERENCES
            if error.param != "json_schema" or not any(word in str(error) for word in words):
                wrong.append((name, group["schema"], str(error)))
            continue
        counts["accepted"] += 1
        faults = faults_of(grammar, group, rng)
        counts["disagreeing"] += bool(faults)
        if faults - KNOWN.get(name, set()):
            wrong.append((name, group["description"], faults))
    print(counts)
    assert not wrong
    assert counts["accepted"] >= ACCEPTED


def keywords(schema: Any) -> set[str]:
    """Return the names in a schema."""
    if isinstance(schema, dict):
        return set(schema).union(*map(keywords, schema.values()))
    return set().union(*map(keywords, schema)) if isinstance(schema, list) else set()
