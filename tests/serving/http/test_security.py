"""The pages about security and serving are true: every test they name exists, every figure is the code's."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from msgspec import inspect

from penstock.serving.grpc.oip_service import oip_methods
from penstock.serving.http.app import operations
from tests.support.command import DEMO, start
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
SECONDS = 60.0


def test_every_test_that_is_named_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "explanation" / "security.md").read_text()))
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 25
    assert sorted(name for name in named if f"def {name}(" not in tests) == []


def texts_of(info: inspect.Type, path: str) -> set[str]:
    """Return the paths of all fields that may hold text, without those that are always refused."""
    match info:
        case inspect.Metadata():
            return set() if "why" in (info.extra or {}) else texts_of(info.type, path)
        case inspect.StructType():
            return set().union(*(texts_of(one.type, f"{path}.{one.name}") for one in info.fields))
        case inspect.UnionType():
            return set().union(*(texts_of(one, path) for one in info.types))
        case inspect.ListType():
            return texts_of(info.item_type, path)
        case inspect.DictType():
            return texts_of(info.value_type, path)
    return {path.lstrip(".")} if isinstance(info, (inspect.StrType, inspect.AnyType)) else set()


def test_no_field_names_a_file_an_address_or_code():
    harmless = {
        "prompt", "input", "messages.content", "messages.content.text", "messages.name", "stop", "bad_words", "model",
        "user", "cache_salt", "text_input", "id", "model_name", "model_version", "inputs.name", "outputs.name",
        "messages.tool_calls.function.name", "messages.tool_calls.function.arguments", "messages.tool_calls.id",
        "messages.tool_calls.function.parsed_arguments", "messages.parsed",  # as the client reads answers; not used
        "messages.tool_call_id", "messages.reasoning_content", "messages.reasoning", "tools.function.name",
        "tools.function.description", "tools.function.parameters", "tool_choice.function.name",
        "chat_template_kwargs",  # variables of the model's own template
        "config",  # labels and versions of a servable
        "inputs.data",
        "query", "documents", "documents.text", "text_1", "text_2", "instruction", "inputs",
        "inputs.question", "inputs.context", "inputs.text", "inputs.text_pair",
        "ignore_labels",  # names of classes, which are compared
        "targets", "src_lang", "tgt_lang",  # looked up in the vocabulary and in config.json
        "generate_parameters",  # whose names are those of a table
        "candidate_labels", "hypothesis_template",  # parts of a text; the template has no format but {} and {0}
        "prompt_name",  # of those in the model's own file
        "prompt_cache_key",  # hashed, to choose a worker
        "metadata", "safety_identifier", "prompt_cache_retention", "dry_sequence_breakers",  # which have no effect
            # grammars, which load nothing
            "json_schema", "regex", "choice", "grammar", "guided_json", "guided_regex", "guided_choice",
            "guided_grammar", "guided_decoding_backend", "response_format.schema", "response_format.json_schema.schema",
            "response_format.json_schema.name", "response_format.json_schema.description", "structured_outputs.json",
            "structured_outputs.regex", "structured_outputs.choice", "structured_outputs.grammar",
        "thinking_format",  # a name of the table
        "worker",  # of an admin: a name among those of the workers
    }  # fmt: skip
    bodies = [operation.body for operation in operations() if operation.body is not None]
    texts = {path.removeprefix("parameters.") for body in bodies for path in texts_of(inspect.type_info(body), "")}
    assert texts - {"parameters"} == harmless  # whose names and values are checked as those of the model's fields
    fields = [field for body in bodies for field in inspect.type_info(body).fields]
    refused = {one.name for one in fields if isinstance(one.type, inspect.Metadata) and "why" in (one.type.extra or {})}
    assert {"chat_template", "documents", "prompt_embeds", "functions", "suffix"} <= refused


def test_no_route_changes_what_is_served():
    """But for what an admin's key is asked for."""
    models = ("infer", "generate", "generate_stream")
    ranks = {"rerank", "rerank_v1", "score", "score_v1", "classify", "pooling", "predict", "predict_task"}
    asks = {*models, *(f"{name}_version" for name in models), "repository_index"}
    assert {(one.method, one.name) for one in operations() if one.method != "GET" and not one.is_admin} == {
        ("POST", name) for name in ("complete", "chat", "embed", "tokenize", "detokenize", *ranks, *asks)
    }
    assert {one.name for one in operations() if one.is_admin} == {
        "repository_load",
        "repository_unload",
        "profile_model",
    }
    grpc = {one.path.rpartition("/")[2] for one in oip_methods() if one.is_admin}
    assert grpc == {"RepositoryModelLoad", "RepositoryModelUnload"}


@pytest.mark.parametrize("grpc", [(), ("--grpc-port", "0")], ids=["http", "grpc"])
def test_one_port_is_open(grpc):
    """Of the service and its workers, whatever the host; with gRPC its own, too."""
    process = start("serve", DEMO, "--port", "0", "--insecure", "--host", "0.0.0.0", *grpc)  # noqa: S104
    try:
        said = process.stdout.readline().decode()
        assert "serves at" in said, process.stderr.read().decode()
        while "try: curl" not in said:
            said += process.stdout.readline().decode()
        ports = {int(port) for port in re.findall(r" at (?:http://)?[\d.]+:(\d+)", said)}
        assert len(ports) == (2 if grpc else 1)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert len(family) > 1

        def listening() -> list[int]:
            found = [one for member in family for one in member.net_connections("inet")]
            found = [one for one in found if one.status == psutil.CONN_LISTEN or one.type.name != "SOCK_STREAM"]
            return [one.laddr.port for one in found]

        until(listening, "a listening socket")
        assert sorted(listening()) == sorted(ports)
    finally:
        process.terminate()
        process.communicate(timeout=SECONDS)


@pytest.mark.parametrize("name", ["serving.md", "security.md"])
def test_the_documents_speak_of_each_other(name):
    assert name in "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md") if path.name != name)
