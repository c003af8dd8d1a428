"""A sampling field is declared once, in the table, and appears everywhere."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import sys

import msgspec
import numpy as np

import penstock.sampling_fields as table
from penstock.core.arrays import Penalties, Sampling, sampling_struct
from penstock.core.library import SamplingStruct
from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.engine.row_state import ROW_DTYPE
from penstock.errors import InvalidArgumentError
from penstock.sampling_fields import FIELD_NAMES, NATIVE_FIELDS, SAMPLING_FIELDS, SamplingField
from penstock.serving.openai.bodies import CompletionRequest
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.request_fields import SAMPLING
from tests.support.errors import raises

READERS = (
    "penstock.engine.params",
    "penstock.engine.row_state",
    "penstock.engine.capabilities",
    "penstock.serving.request_fields",
    "penstock.serving.openai.bodies",
    "penstock.serving.oip.bodies",
    "penstock.serving.oip.language",
    "penstock.serving.workers.messages",
)
ADDED = SamplingField(
    name="extra_p", kind="number", wire=99, bounds=(0, 5), off=2.0, dtype="f4", is_filter=True, help="An extra filter."
)


def properties_of(struct):
    return msgspec.json.schema(struct)["$defs"][struct.__name__]["properties"]


def test_the_typed_names_are_those_of_the_table():
    assert tuple(SamplingParams.__dataclass_fields__) == FIELD_NAMES
    resolved = {row.row_name for row in SAMPLING_FIELDS if row.row_name in ResolvedSampling.__dataclass_fields__}
    others = {"end_ids", "grammar", "hook", "thoughts"}
    assert resolved - {"grammar"} == set(ResolvedSampling.__dataclass_fields__) - others
    assert {row.row_name for row in NATIVE_FIELDS} <= resolved


def test_defaults_are_those_of_the_table():
    params, resolved = SamplingParams(), ResolvedSampling()
    for row in SAMPLING_FIELDS:
        assert getattr(params, row.name) == ({} if row.kind == "biases" else row.default)
        assert getattr(resolved, row.row_name, row.off) == row.off


def test_the_wire_message_has_the_numbers_of_the_table():
    kinds = {"number": {"double"}, "boolean": {"bool"}, "integer": {"uint32", "uint64"}}
    kinds |= {kind: {"string"} for kind in ("strings", "choices", "schema", "text")}
    names = {1: "double", 4: "uint64", 8: "bool", 9: "string", 13: "uint32"}
    descriptors = {one.name: one for one in pb.Sampling.DESCRIPTOR.fields}
    assert {name: one.number for name, one in descriptors.items()} == {row.name: row.wire for row in SAMPLING_FIELDS}
    for row in SAMPLING_FIELDS:
        if row.kind in kinds:
            assert names[descriptors[row.name].type] in kinds[row.kind]
        is_list = (
            row.kind in ("strings", "token_ids", "id_lists", "biases", "choices") and row.name != "allowed_token_ids"
        )
        assert descriptors[row.name].is_repeated == is_list


def test_the_service_has_every_field_with_its_help():
    assert set(SAMPLING) == {row.name for row in SAMPLING_FIELDS if row.is_common}
    properties = properties_of(CompletionRequest)
    for row in SAMPLING_FIELDS:
        if row.is_common:
            assert properties[row.name]["description"].startswith(row.help)


def test_the_native_struct_reads_every_native_field():
    rows = 2
    arrays = {row.row_name: np.ones(rows, row.dtype) for row in NATIVE_FIELDS}
    penalties = {row.name.removesuffix("_penalty"): arrays.pop(row.name) for row in NATIVE_FIELDS if row.is_penalty}
    starts = np.zeros(rows + 1, np.int32)
    history = Penalties(**penalties, starts=starts, prompt_lens=np.zeros(rows, np.int32), history=starts[:0])
    sampling = Sampling(**arrays, counter=np.zeros((rows, 2), np.int64), penalties=history)
    struct, _ = sampling_struct(sampling, 64)
    for row in NATIVE_FIELDS:
        assert getattr(struct, row.row_name), row.name
        assert row.row_name in dict(SamplingStruct._fields_)
        assert ROW_DTYPE[row.row_name] == np.dtype(row.dtype)
        wrong = np.ones(rows, "f8")
        if row.is_penalty:
            changed = dataclasses.replace(
                sampling, penalties=dataclasses.replace(history, **{row.name.removesuffix("_penalty"): wrong})
            )
        else:
            changed = dataclasses.replace(sampling, **{row.row_name: wrong})
        with raises(InvalidArgumentError, match=rf"^{row.row_name}: .*float64"):
            sampling_struct(changed, 64)
    assert ctypes.sizeof(SamplingStruct) == struct.struct_size


def test_a_field_added_to_the_table_appears_everywhere(monkeypatch):
    before = {name: sys.modules.get(name) for name in READERS}
    monkeypatch.setattr(table, "SAMPLING_FIELDS", (*SAMPLING_FIELDS, ADDED))
    monkeypatch.setattr(table, "FIELD_NAMES", (*FIELD_NAMES, "extra_p"))
    monkeypatch.setattr(table, "NATIVE_FIELDS", (*NATIVE_FIELDS, ADDED))
    try:
        for name in READERS:
            sys.modules.pop(name)
        params, row_state, _, _, openai, oip, *_ = (importlib.import_module(name) for name in READERS)
        assert params.SamplingParams().extra_p is None
        assert params.SamplingParams(extra_p=1).extra_p == 1.0
        with raises(InvalidArgumentError, param="extra_p", match="got 6"):
            params.SamplingParams(extra_p=6)
        with raises(InvalidArgumentError, param="extra_pp", match="extra_p"):
            params.SamplingParams(extra_pp=1)
        assert "extra_p" in row_state.ROW_DTYPE.names
        for struct in (openai.CompletionRequest, openai.ChatCompletionRequest, oip.InferParameters):
            field = properties_of(struct)["extra_p"]
            assert field["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 5}
            assert field["description"] == "An extra filter."
    finally:
        for name, module in before.items():
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)
