"""The route /predict of a T5: translations and summaries, as the offline pipelines return them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from penstock import LLM, pipeline
from penstock.api_errors import FieldError
from penstock.checkpoint.generation import GenerationDefaults
from penstock.errors import InvalidArgumentError
from penstock.serving.openai import texts_of_texts
from penstock.text.tasks.text_to_text import TextToTextTasks
from tests.support.encoders import LIMITS
from tests.support.errors import raises
from tests.support.http_service import Service
from tests.support.text_tasks import write_folder, write_t5

TEXTS = ["the cat", "w3 the w4", "w5"]
SPECIAL = [[0], [2]]
LONG = {"min_new_tokens": 3, "max_new_tokens": 7, "bad_words_ids": SPECIAL}
CASES: dict[str, dict[str, Any]] = {
    "beams of the file": LONG,
    "more beams": LONG | {"num_beams": 5, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
    "greedy": LONG | {"num_beams": 1, "no_repeat_ngram_size": 1, "bad_words_ids": [*SPECIAL, [7], [9, 4]]},
    "sampled": LONG | {"num_beams": 1, "do_sample": True, "temperature": 2.0, "seed": 5},
    "lengths of the decoder": {"max_length": 6, "min_length": 5, "bad_words_ids": SPECIAL},
}


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("t5")
    write_t5(folder)
    llm = LLM(folder, mode="eager", limits=LIMITS)
    translate, summarize = pipeline("translation_en_to_de", llm), pipeline("summarization", llm)
    results: dict[str, Any] = {
        name: (translate(TEXTS, **case), translate(TEXTS[0], **case)) for name, case in CASES.items()
    }
    results["summary"] = summarize(TEXTS[1], **LONG)
    results["cut"] = translate("w1 w2 " * 200, truncation=True, **LONG)
    return llm, results


@pytest.fixture(scope="module")
def service(offline: tuple[LLM, dict[str, Any]]) -> Iterator[Service]:
    made = Service({"t5": offline[0]})
    yield made
    made.close()


@pytest.mark.parametrize("name", CASES)
def test_texts_are_those_of_the_pipeline(name: str, service: Service, offline: tuple[LLM, dict[str, Any]]) -> None:
    several, single = offline[1][name]
    assert all(text for one in several for text in (one if isinstance(one, dict) else one[0]).values())
    named = {"parameters": {"generate_parameters": CASES[name]}}
    assert service.post("/predict", inputs=TEXTS, **named) == several
    assert service.post("/predict", inputs=TEXTS[0], **named) == single
    languages = {"parameters": named["parameters"] | {"src_lang": "en", "tgt_lang": "de"}}
    assert service.post("/predict/translation", inputs=TEXTS[0], **languages) == single


def test_a_text_is_cut_on_request(service: Service, offline: tuple[LLM, dict[str, Any]]) -> None:
    body = {"inputs": "w1 w2 " * 200, "parameters": {"generate_parameters": LONG}}
    assert service.refused("/predict", **body)[0] == 400
    assert service.post("/predict", **body, truncate=True) == offline[1]["cut"]
    body["parameters"]["truncation"] = "only_first"  # type: ignore[index]
    assert service.post("/predict", **body) == offline[1]["cut"]


def test_hugging_face_translates_and_summarizes(service: Service, offline: tuple[LLM, dict[str, Any]]) -> None:
    def client(task: str) -> huggingface_hub.InferenceClient:
        return huggingface_hub.InferenceClient(model=f"{service.url}/predict{task}", token="none")  # noqa: S106

    expected = offline[1]["beams of the file"][1][0]["translation_text"]
    found = client("").translation(TEXTS[0], generate_parameters=LONG)
    assert found.translation_text == expected
    found = client("").translation(TEXTS[0], src_lang="en", tgt_lang="de", generate_parameters=LONG)
    assert found.translation_text == expected
    summary = client("/summarization").summarization(TEXTS[1], truncation="only_first", generate_parameters=LONG)
    assert [{"summary_text": summary.summary_text}] == offline[1]["summary"]


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"generate_parameters": {"num_beams": 129}}, "generate_parameters.num_beams"),
        ({"generate_parameters": {"num_beams": 17}}, "generate_parameters.num_beams"),
        ({"generate_parameters": {"num_beams": 16, "eos_token_id": [*range(64)]}}, "generate_parameters.eos_token_id"),
        ({"generate_parameters": {"eos_token_id": -1}}, "generate_parameters.eos_token_id"),
        ({"generate_parameters": {"eos_token_id": [1, -1]}}, "generate_parameters.eos_token_id[1]"),
        ({"generate_parameters": {"eos_token_id": [99999]}}, "generate_parameters.eos_token_id"),
        ({"generate_parameters": {"max_new_tokens": 0}}, "generate_parameters.max_new_tokens"),
        ({"generate_parameters": {"min_new_tokens": -1}}, "generate_parameters.min_new_tokens"),
        ({"generate_parameters": {"min_length": 90, "max_length": 50}}, "generate_parameters.min_length"),
        ({"generate_parameters": {"num_return_sequences": 0}}, "generate_parameters.num_return_sequences"),
        (
            {"generate_parameters": {"num_beams": 2, "num_return_sequences": 3}},
            "generate_parameters.num_return_sequences",
        ),
        ({"generate_parameters": {"do_sample": True}}, "generate_parameters.do_sample"),
        ({"generate_parameters": {"nu_beams": 2}}, "generate_parameters.nu_beams"),
        ({"generate_parameters": {"logits_processor": []}}, "generate_parameters.logits_processor"),
        ({"generate_parameters": {"output_scores": True}}, "generate_parameters.output_scores"),
        ({"generate_parameters": {"regex": "a"}}, "generate_parameters.regex"),
        ({"generate_parameters": {"early_stopping": "soon"}}, "generate_parameters.early_stopping"),
        ({"generate_parameters": {"guidance_scale": 2}}, "generate_parameters.guidance_scale"),
        ({"generate_parameters": {"max_length": 1}}, "generate_parameters.max_length"),
        ({"generate_parameters": {"bad_words_ids": [[99999]]}}, "generate_parameters.bad_words_ids"),
        ({"generate_parameters": 3}, "generate_parameters"),
        ({"src_lang": "en"}, "tgt_lang"),
        ({"src_lang": "en", "tgt_lang": "fr"}, "tgt_lang"),
        ({"clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces"),
        ({"truncation": "all"}, "truncation"),
        ({"truncation": "only_second"}, "truncation"),
        ({"tgt_lang": "de"}, "src_lang"),
        ({"top_k": 2}, "top_k"),
    ],
)
def test_wrong_options_of_texts_are_named(parameters: dict[str, Any], param: str, service: Service) -> None:
    status, error = service.refused("/predict", inputs="the cat", parameters=parameters)
    assert (status, error["param"]) == (400, f"parameters.{param}")


def test_wrong_tasks_and_inputs_are_named(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    assert service.refused("/predict/fill-mask", inputs="a")[1]["param"] == "task"
    assert service.refused("/predict", inputs=[["a", "b"]])[1]["param"] == "inputs[0]"
    assert service.refused("/predict", inputs="a", raw_scores=True)[1]["param"] == "raw_scores"
    named = {"src_lang": "en", "tgt_lang": "de"}
    assert service.refused("/predict/summarization", inputs="a", parameters=named)[1]["param"] == "parameters.src_lang"
    monkeypatch.setattr(texts_of_texts, "_MAX_ANSWERS", 7)
    assert service.refused("/predict", inputs=TEXTS)[1]["param"] == "inputs"


@pytest.mark.parametrize(
    ("task", "languages", "param"),
    [
        ("summarization", {"tgt_lang": "de"}, "parameters.tgt_lang"),
        ("translation", {"tgt_lang": "de"}, "parameters.src_lang"),
        ("translation_en_to_de", {"src_lang": "en", "tgt_lang": "fr"}, "parameters.tgt_lang"),
        ("translation_en_to_de", {"src_lang": "fr"}, "parameters.src_lang"),
        ("translation_en_to_zz", {}, "task"),
    ],
)
def test_languages_without_effect_are_refused(
    task: str, languages: dict[str, Any], param: str, service: Service
) -> None:
    status, error = service.refused(f"/predict/{task}", inputs="a", parameters=languages)
    assert (status, error["param"], error["code"]) == (400, param, "invalid_value")


def tasks_of(of_tasks: dict[str, Any]) -> TextToTextTasks:
    return TextToTextTasks.read({"config.json": json.dumps({"task_specific_params": of_tasks}).encode()})


def task_named(name: str, *of_tasks: str) -> str:
    """The task of the path ``name``, with these tasks in config.json."""
    call: Any = SimpleNamespace(path_values={"task": name} if name else {})
    body: Any = SimpleNamespace(parameters=None)
    return texts_of_texts._task(call, tasks_of({task: {} for task in of_tasks}), body)


def test_a_task_without_languages_is_the_files_own() -> None:
    german, french = "translation_en_to_de", "translation_en_to_fr"
    assert task_named("translation", german) == task_named("", german) == german
    assert task_named("translation", german, "summarization") == german
    assert task_named("", german, "summarization") == "summarization"
    assert task_named("translation") == task_named("translation", "translation", german) == "translation"
    assert task_named("summarization", german) == "summarization"
    with raises(FieldError, param="parameters.tgt_lang"):
        task_named("translation", german, french, "summarization")
    with raises(FieldError, param="task"):
        task_named("translation", "summarization")


def test_languages_that_the_file_lacks_are_refused() -> None:
    with raises(InvalidArgumentError, param="tgt_lang"):
        tasks_of({}).choose("xx", "yy")
    with raises(InvalidArgumentError, param="tgt_lang"):
        tasks_of({"summarization": {}}).choose("en", "de")


@pytest.mark.parametrize("name", ["suppress_tokens", "begin_suppress_tokens"])
def test_a_file_whose_rows_change_in_python_is_refused(name: str) -> None:
    with raises(FieldError, param="task", code="unsupported_parameter"):
        texts_of_texts._generation({name: [3]}, {}, GenerationDefaults())


def test_long_searches_and_texts_are_named(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = LIMITS.context_len
    for num_tokens in (limit - 2, limit - 1, limit, limit + 9):  # with the end token one more
        error = service.refused("/predict", inputs="w1 " * num_tokens, parameters={"generate_parameters": LONG})[1]
        assert (error["param"], error["code"]) == ("inputs", "context_length_exceeded")
    cut = service.refused("/predict", inputs="the cat", truncate_prompt_tokens=-1)[1]
    assert cut["param"] == "truncate_prompt_tokens"
    two = {"parameters": {"generate_parameters": {"num_beams": 2, "stop_strings": ["w"]}}}
    assert service.refused("/predict", inputs="a", **two)[1]["param"] == "parameters.generate_parameters.stop_strings"
    sampled = {"parameters": {"generate_parameters": {"do_sample": True}}}
    assert service.refused("/predict", inputs="a", **sampled)[1]["code"] == "unsupported_parameter"
    monkeypatch.setattr(texts_of_texts, "_MAX_BEAM_TOKENS", 21)
    assert service.refused("/predict", inputs=TEXTS, parameters={"generate_parameters": LONG})[1]["param"] == "inputs"
    for name in ("max_new_tokens", "max_length"):
        own = {"parameters": {"generate_parameters": {name: 60}}}
        path = f"parameters.generate_parameters.{name}"
        assert service.refused("/predict", inputs="a", **own)[1]["param"] == path


def test_the_files_of_a_model_are_read_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.post("/predict", inputs="the cat", parameters={"generate_parameters": LONG})
    monkeypatch.setattr(TextToTextTasks, "read", None)
    service.post("/predict", inputs="the cat", parameters={"generate_parameters": LONG})


def test_a_task_in_the_path_is_one_of_t5(tmp_path: Any) -> None:
    write_folder(tmp_path, "ForMaskedLM")
    service = Service({"words": LLM(tmp_path, mode="eager", limits=LIMITS)})
    try:
        assert service.refused("/predict/summarization", inputs="a cat")[1]["param"] == "task"
    finally:
        service.close()


def test_a_search_follows_one_that_ran_out_of_time(service: Service, offline: tuple[LLM, dict[str, Any]]) -> None:
    asked = {"inputs": "the cat", "parameters": {"generate_parameters": {"min_new_tokens": 60, "max_new_tokens": 60}}}
    status, _, _ = service.ask("POST", "/predict", asked | {"timeout": 0.001})
    assert status == 504
    answer = service.post("/predict", inputs=TEXTS[0], parameters={"generate_parameters": LONG})
    assert answer == offline[1]["beams of the file"][1]
