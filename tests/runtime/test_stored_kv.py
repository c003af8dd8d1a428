"""The type of keys and values that a quantized folder says."""

from __future__ import annotations

import json

import pytest

from penstock.errors import InvalidFileError, UnsupportedError
from penstock.runtime.stored_kv import stored_kv_layout
from tests.support.errors import raises


def config(method: str, **section: object) -> bytes:
    return json.dumps({"quantization_config": {"quant_method": method, **section}}).encode()


@pytest.mark.parametrize(
    ("data", "layout"),
    [
        (None, None),
        (b"{}", None),
        (b'{"kv_cache": "int8"}', None),
        (config("penstock"), None),
        (config("penstock", kv_cache="int8"), "int8"),
        (config("penstock", kv_cache="int4"), "int4"),
        (memoryview(config("penstock", kv_cache="f32")), "f32"),
        (config("penstock", kv_cache="auto"), None),
        (config("penstock", kv_cache=None), None),
        (config("gptq", kv_cache="fp8"), None),
    ],
)
def test_only_folders_of_penstock_say_it(data: bytes | memoryview | None, layout: str | None) -> None:
    assert stored_kv_layout(data) == layout


@pytest.mark.parametrize("value", ["int3", 8])
def test_another_type_is_refused(value: object) -> None:
    with raises((InvalidFileError, UnsupportedError), match="kv_cache"):
        stored_kv_layout(config("penstock", kv_cache=value))
