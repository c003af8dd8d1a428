"""Objects survive the way through messages, and the generated code matches ``wire.proto``."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock import errors
from penstock.engine.logprobs import TokenLogprobs
from penstock.engine.options import BeamSettings, RequestOptions
from penstock.engine.params import SamplingParams
from penstock.engine.prompt_logits import Places
from penstock.engine.stats import EngineStats
from penstock.errors import InternalError, InvalidArgumentError, UnavailableError
from penstock.llm.backend import ModelCard
from penstock.llm.engine_thread import Started, StepEvent
from penstock.sampling_fields import FIELD_NAMES
from penstock.servables.process import worker_messages_pb2
from penstock.serving.proto import health_pb2, oip_pb2, reflection_pb2
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers import messages as wire
from penstock.serving.workers.worker_config import WorkerConfig, WorkerModelOptions
from tests.support.errors import raises

FOLDER = Path(penstock.__file__).parents[1]


@pytest.mark.parametrize(
    "generated", [pb, oip_pb2, reflection_pb2, health_pb2, worker_messages_pb2], ids=lambda one: one.DESCRIPTOR.package
)
def test_generated_code_matches_the_proto_files(generated) -> None:
    """Compare messages, fields, numbers, types, labels and methods with the text of the file."""
    text = re.sub(r"//.*", "", (FOLDER / generated.DESCRIPTOR.name).read_text())
    found: dict[str, dict[str, tuple[int, str]]] = {}
    _add(found, generated.DESCRIPTOR.message_types_by_name.values())
    assert _written(text) == found
    methods = re.findall(r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);", text)
    assert methods == [
        (
            one.name, "stream " * one.client_streaming, one.input_type.name,
            "stream " * one.server_streaming, one.output_type.name,
        )
        for service in generated.DESCRIPTOR.services_by_name.values()
        for one in service.methods
    ]  # fmt: skip


def _written(text: str) -> dict[str, dict[str, tuple[int, str]]]:
    found: dict[str, dict[str, tuple[int, str]]] = {}
    inside: list[str] = []  # names of messages, "" for what else has braces
    for line in text.splitlines():
        if opened := re.match(r"\s*(message|oneof|enum|service) (\w+) \{", line):
            inside.append(opened[2] if opened[1] == "message" else "")
            if opened[1] == "message":
                found[".".join(filter(None, inside))] = {}
        elif field := re.match(r"\s*((?:repeated |optional )?)(\w[\w<>, ]*?) (\w+) = (\d+);", line):
            found[".".join(filter(None, inside))][field[3]] = (int(field[4]), field[1] + field[2].strip())
        if line.rstrip().endswith("}"):
            inside.pop()
    return found


def _add(found: dict[str, dict[str, tuple[int, str]]], messages) -> None:
    for message in messages:
        if not message.GetOptions().map_entry:
            name = message.full_name.removeprefix(message.file.package + ".")
            found[name] = {field.name: (field.number, _kind(field)) for field in message.fields}
            _add(found, message.nested_types)


def _kind(field) -> str:
    names = {
        1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 6: "fixed64", 8: "bool", 9: "string", 12: "bytes",
        13: "uint32", 17: "sint32",
    }  # fmt: skip
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return f"map<{_kind(key)}, {_kind(value)}>"
    other = field.message_type or field.enum_type
    kind = other.name if other is not None else names[field.type]
    label = "repeated " if field.is_repeated else ""
    optional = field.containing_oneof is not None and field.containing_oneof.name.startswith("_")
    return ("optional " if optional else label) + kind


FULL = {
    "max_tokens": 9, "min_tokens": 2, "temperature": 0.0, "top_k": 0, "top_p": 0.5, "min_p": 0.25, "typical_p": 1.0,
    "repetition_penalty": 1.1, "presence_penalty": -2.0, "frequency_penalty": 0.1, "logit_bias": {5: -100.0, 0: 0.1},
    "allowed_token_ids": [1, 2], "bad_words": ["a", "ä b"], "seed": 2**64 - 1, "n": 2, "best_of": 3, "stop": ["x"],
    "stop_token_ids": [0, 7], "include_stop_str_in_output": True, "ignore_eos": True, "logprobs": 0,
    "skip_special_tokens": False, "prompt_logprobs": 0, "echo": True, "json_schema": '{"type": "null"}',
    "no_repeat_ngram_size": 2, "bad_words_ids": [[1, 2], [3]], "forced_bos_token_id": 0, "forced_eos_token_id": 4,
    "thinking_token_budget": 0, "thinking_format": "think", "kept_special_token_ids": [3, 4],
}  # fmt: skip
GRAMMARS = {"json_object": True, "regex": "a|b", "choice": ["a", "ä b"], "grammar": 'start: "a"'}
"""The other fields of which a request has one."""


def test_sampling_round_trips() -> None:
    names = {field.name for field in pb.Sampling.DESCRIPTOR.fields}
    assert set(FULL | GRAMMARS) == set(FIELD_NAMES) == names
    single = [{name: value} for name, value in (FULL | GRAMMARS).items() if name not in ("best_of", "min_tokens")]
    for given in ({}, FULL, *single):
        params = SamplingParams(**given)
        message = pb.Sampling.FromString(wire.sampling_to(params).SerializeToString())
        assert wire.sampling_from(message) == params
    with raises(InvalidArgumentError, param="temperature"):
        wire.sampling_from(pb.Sampling(temperature=-1.0))


def test_searches_and_places_round_trip() -> None:
    for early in (True, False, "never"):
        beams = BeamSettings(4, 0.5, early)
        assert wire.beams_from(pb.Submit(beams=wire.beams_to(beams))) == beams
    assert wire.beams_from(pb.Submit(beams=wire.beams_to(BeamSettings()))) is None
    for num_beams, early, param in ((129, "never", "num_beams"), (2, "soon", "early_stopping")):
        with raises(InvalidArgumentError, param=param):
            wire.beams_from(pb.Submit(beams=pb.Beams(num_beams=num_beams, early_stopping=early)))
    for places in (Places((0, 3)), Places((2,), (5, 4))):
        assert wire.places_from(pb.Score(places=wire.places_to(places))) == places
    assert wire.places_from(pb.Score(places=wire.places_to(None))) is None
    for positions, tokens in (((2, 1), ()), ((), ()), ((1, 1), ()), ((0, 8), ()), ((0,), (40,))):
        with raises(InvalidArgumentError):
            Places(positions, tokens).checked(8, 40)


def test_options_cards_and_configurations_round_trip() -> None:
    assert {field.name for field in dataclasses.fields(RequestOptions)} - {"session"} == {  # it chooses the worker
        f.name for f in pb.Options.DESCRIPTOR.fields
    }
    for options in (RequestOptions(), RequestOptions(-3, 0.5, "salt", True)):
        assert wire.options_from(wire.options_to(options)) == options
    card = ModelCard("m", 5, 6, 7, "w8a8", "llama", "m.psm", 3, True, True, True, "topk")
    assert wire.card_from(wire.card_to(card)) == card
    config = WorkerConfig("unix:/x", "token", "m", "/m.psm", 2, "always", 5, WorkerModelOptions(threads=2))
    assert WorkerConfig.from_json(config.to_json()) == config
    for wrong in ("", "[]", "{}", config.to_json().replace('"threads": 2', '"threads": 2, "more": 1')):
        with raises(InvalidArgumentError, param="configuration"):
            WorkerConfig.from_json(wrong)


def test_errors_round_trip_by_class() -> None:
    for name in sorted({*errors.__all__} - {"ServiceError"}):  # which a client raises, and no engine
        kind = getattr(errors, name)
        again = wire.error_from(wire.error_to(kind("what")))
        assert (type(again), str(again)) == (kind, "what")
    again = wire.error_from(wire.error_to(UnavailableError("later", 7.5, param="model", code="loading")))
    assert isinstance(again, UnavailableError)
    assert (again.retry_after_s, again.param, again.code) == (7.5, "model", "loading")
    assert isinstance(wire.error_from(wire.error_to(KeyError("x"))), InternalError)
    assert type(wire.error_from(pb.Error(kind="SystemExit", text="x"))) is InternalError


def test_step_events_round_trip() -> None:
    row = TokenLogprobs(5, -0.1, 2, ((4, -0.05), (5, -0.1)))
    started = Started(2**64 - 1, 4, 3, [None, row, row], 0.5, 0.25)
    many = [
        StepEvent(1, 0, "ä", [1, 2], [row, TokenLogprobs(6, -1 / 3, 1)], None, started),
        StepEvent(2, 1, "", [], [], "length", Started(3, 1), {"total_s": 0.1}, np.float32([1.5, -0.1]), None, True),
        StepEvent(3, error=InvalidArgumentError("no"), is_last=True),
        StepEvent(4, 0, "x", [7]),
        StepEvent(4, 1, "y", [8], seed=2**64 - 1),
    ]
    for news in many:
        step = pb.Step()
        wire.event_to(news, step.events)
        again = wire.event_from(pb.Step.FromString(step.SerializeToString()).events[0])
        for field in dataclasses.fields(StepEvent):
            one, other = getattr(news, field.name), getattr(again, field.name)
            if field.name == "vector" and one is not None:
                np.testing.assert_array_equal(one, other)
            elif field.name == "error" and one is not None:
                assert (type(one), str(one)) == (type(other), str(other))
            else:
                assert one == other, field.name


def test_stats_of_several_engines_add_up() -> None:
    given = {
        field.name: {"stop": 2} if "Mapping" in str(field.type) else 3 for field in dataclasses.fields(EngineStats)
    }
    figures = EngineStats(**given)
    message = wire.stats_to(figures)
    assert wire.stats_from([message]) == figures
    total = wire.stats_from([message, message])
    assert (total.num_steps, total.num_finished) == (6, {"stop": 4})
    assert wire.stats_from([]).num_steps == 0


def test_steps_merge_into_one_event_for_each_answer() -> None:
    """As if one step had made all tokens.  A request's last event and errors stay behind all others of the request."""
    first = [
        StepEvent(1, 0, "a", [5], started=Started(seed=3, num_prompt_tokens=2)),
        StepEvent(2, 1, "x", [6], seed=4),
    ]
    second = [
        StepEvent(1, 0, "b", [7, 8], finish_reason="stop", timings={"total_s": 1.0}),
        StepEvent(1, 1, "z", [2], seed=5, finish_reason="stop", is_last=True),
        StepEvent(2, 0, "y", [9]),
        StepEvent(2, 1, "w", [3], finish_reason="stop", is_last=True),
        StepEvent(3, error=UnavailableError("gone"), is_last=True),
    ]
    messages = [pb.FromWorker(step=pb.Step()) for _ in range(3)]
    for message, events in zip(messages, (first, second), strict=False):
        for event in events:
            wire.event_to(event, message.step.events)
    assert wire.merge_steps(messages[0], messages[1])
    merged = [wire.event_from(event) for event in messages[0].step.events]
    assert [(event.key, event.index, event.text, event.token_ids, event.is_last) for event in merged] == [
        (1, 0, "ab", [5, 7, 8], False), (2, 1, "x", [6], False), (1, 1, "z", [2], True),
        (2, 0, "y", [9], False), (2, 1, "w", [3], True), (3, 0, "", [], True),
    ]  # fmt: skip
    assert merged[0].started == first[0].started
    assert (merged[0].finish_reason, merged[0].timings) == ("stop", {"total_s": 1.0})
    assert (merged[1].seed, merged[2].seed, str(merged[5].error)) == (4, 5, "gone")
    messages[2].step.pages.number = 1
    assert not wire.merge_steps(messages[0], messages[2])
    assert not wire.merge_steps(messages[0], pb.FromWorker(heartbeat=pb.Heartbeat()))
