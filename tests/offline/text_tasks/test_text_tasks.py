"""Tasks of pipeline beside text generation: the results of transformers' pipelines on tiny networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock import LLM, InferTask, pipeline
from penstock.errors import PenstockError
from penstock.offline.text_tasks import fill_mask
from penstock.offline.text_tasks.natural import task_of_files
from tests.support.documents import blocks
from tests.support.encoders import LIMITS
from tests.support.errors import raises
from tests.support.lite_demo import ROOT
from tests.support.text_tasks import assert_close, write_folder, write_t5

_LONG = "The cats microsoft zzz sat in new york. " * 6
_TAGS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
_NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}
_IDS = {"id2label": _NLI, "label2id": {name: i for i, name in _NLI.items()}, "num_labels": 3}

Call = tuple[Any, dict[str, Any]]
TASKS: dict[str, tuple[str, dict[str, Any], list[Call]]] = {
    "text-classification": (
        "ForSequenceClassification",
        {"num_labels": 3},
        [
            ("The cats sat on the mat.", {}),
            (["a cat", "microsoft in new york"], {}),
            ("a cat", {"top_k": None}),
            (["a", "b"], {"top_k": 2}),
            ({"text": "a cat", "text_pair": "the mat"}, {}),
            ("a cat", {"function_to_apply": "sigmoid"}),
            ("the cat " * 30, {"truncation": True}),
            ("the cat " * 30, {"max_length": 8}),
            ("the cat", {"max_length": 3, "truncation": "do_not_truncate"}),
            ("a cat", {"top_k": 1}),
        ],
    ),
    "fill-mask": (
        "ForMaskedLM",
        {},
        [
            ("the [MASK] sat on microsoft", {}),
            (["a [MASK] b", "[MASK] cat [MASK]"], {"top_k": 3}),
            ("a [MASK]", {"targets": ["cat", "mat", "sat"]}),
            ("a [MASK]", {"targets": ["cat", "microsofts", "sat", "cat"], "top_k": 2}),
            ("a [MASK]", {"targets": "york", "top_k": 30}),
            ("a [MASK]", {"top_k": 24}),
            ("[MASK] cat " * 30, {"tokenizer_kwargs": {"truncation": True}}),
            ("[MASK] cat " * 30, {"tokenizer_kwargs": {"max_length": 9}}),
            ("[MASK] cat", {"tokenizer_kwargs": {"max_length": 3, "truncation": "do_not_truncate"}}),
        ],
    ),
    "ner": (
        "ForTokenClassification",
        {"num_labels": 5, "id2label": _TAGS},
        [
            *(
                ("The cats zzz Microsoft sat in new york.", {"aggregation_strategy": strategy})
                for strategy in ("none", "simple", "first", "average", "max")
            ),
            (_LONG, {"aggregation_strategy": "simple", "stride": 4}),
            ("The cats " * 40, {}),
            (["a cat", "cats in york"], {"aggregation_strategy": "average", "ignore_labels": []}),
            ([["a", "cats", "microsoft"]], {"is_split_into_words": True}),
            ("The cats sat in new york.", {"ignore_labels": None}),
        ],
    ),
    "feature-extraction": ("", {}, [("a cat", {}), (["a", "cats sat"], {})]),
    "zero-shot-classification": (
        "ForSequenceClassification",
        _IDS,
        [
            ("the cats sat", {"candidate_labels": "positive, negative,cat"}),
            (["the cats sat", "a"], {"candidate_labels": ["positive", "new"], "multi_label": True}),
            ("a cat " * 30, {"candidate_labels": ["positive"], "hypothesis_template": "this is {}"}),
        ],
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_results_are_those_of_transformers(task: str, tmp_path: Path) -> None:
    kind, changes, calls = TASKS[task]
    model, tokenizer = write_folder(tmp_path, kind, **changes)
    theirs = transformers.pipeline(task, model=model, tokenizer=tokenizer)
    with pipeline(task, tmp_path, backend="eager") as own:
        for inputs, options in calls:
            assert_close(own(inputs, **options), theirs(inputs, **options))


@pytest.mark.parametrize(
    ("problem", "num_labels"), [("regression", 2), ("multi_label_classification", 2), (None, 2), (None, 1)]
)
def test_scores_follow_the_problem_type(problem: str | None, num_labels: int, tmp_path: Path) -> None:
    """Not the keys of sentence-transformers; ``top_k`` of the pipeline leaves a list around a single text."""
    model, tokenizer = write_folder(tmp_path, "ForSequenceClassification", num_labels=num_labels)
    model.config.problem_type = problem
    path = tmp_path / "config.json"
    keys = {"problem_type": problem, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    keys = {name: value for name, value in keys.items() if value is not None}
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    theirs = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)
    with pipeline("text-classification", tmp_path, backend="eager", top_k=None) as own:
        for inputs, options in (("a cat", {}), ("a cat", {"top_k": 1}), (["a cat"], {})):
            assert_close(own(inputs, **options), theirs(inputs, **options))


def test_a_mask_is_that_of_the_given_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without a tokenizer opens with one.  Errors of later texts count all texts of the call."""
    write_folder(tmp_path / "model", "ForMaskedLM")
    (tmp_path / "words").mkdir()
    for path in (tmp_path / "model").glob("*token*"):
        path.rename(tmp_path / "words" / path.name)
    starts = []
    run = fill_mask.run_prompts

    def record(*values: Any, first: int) -> Any:
        starts.append(first)
        return run(*values, first=first)

    monkeypatch.setattr(fill_mask, "run_prompts", record)
    monkeypatch.setattr(fill_mask, "_AT_ONCE", 2)
    with pipeline("fill-mask", tmp_path / "model", tokenizer=tmp_path / "words", backend="eager", top_k=1) as own:
        assert len(own(["a [MASK]", "[MASK] cat", "[MASK]"])) == 3
    assert starts == [0, 2]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    write_folder(folder, "ForQuestionAnswering", max_len=90)
    return folder


def test_without_a_task_it_is_that_of_the_model(answers: Path) -> None:
    with pipeline(model=answers, backend="eager") as own:
        assert own.name == pipeline(model=own.llm).name == "question_answering"


@pytest.mark.parametrize(
    ("name", "model_type", "task"),
    [
        ("RobertaForSequenceClassification", "xlm-roberta", "text_classification"),
        ("DistilBertForTokenClassification", "distilbert", "token_classification"),
        ("BertForMaskedLM", "bert", "fill_mask"),
        ("BertModel", "bert", "feature_extraction"),
        ("T5ForConditionalGeneration", "t5", "text2text_generation"),
        ("Gemma3ForConditionalGeneration", "gemma3", "text_generation"),
        ("ChatGLMModel", "chatglm", "text_generation"),
        (None, "llama", "text_generation"),
    ],
)
def test_the_class_of_a_network_names_its_task(name: str | None, model_type: str, task: str, tmp_path: Path) -> None:
    classes = {} if name is None else {"architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **classes}))
    assert task_of_files(tmp_path) == task


def test_answers_are_those_of_transformers(answers: Path) -> None:
    """Those of its pipeline, which version 4 had (the file was made with 4.57.3)."""
    cases = json.loads(Path(__file__).with_name("answers.json").read_text())
    with pipeline("question-answering", answers, backend="eager") as own:
        for case in cases:
            assert_close(own(**case["call"]), case["result"])
        call = cases[0]["call"]
        assert_close(own({"question": call["question"], "context": call["context"]}), cases[0]["result"])
        with raises(PenstockError, param="context"):
            own(question="who?", context="")
        with raises(PenstockError, param="doc_stride"):
            own(question="who " * 80, context="the cat " * 20)


def test_a_bundle_of_the_core_has_the_same_result(answers: Path) -> None:
    call = {"question": "who sat?", "context": "The cats sat on the mat."}
    with pipeline("question_answering", answers, backend="eager") as own, LLM(answers, limits=LIMITS) as llm:
        assert_close(pipeline("question_answering", llm)(**call), own(**call))
        with raises(PenstockError, param="task"):
            pipeline("fill_mask", llm)
        with raises(PenstockError, param="top_n"):
            pipeline("question_answering", llm)(**call, top_n=1)
        assert llm.embed([2, 5, 3], "all").vector.shape == (3, 80)  # type: ignore[union-attr]


def test_tasks_have_the_names_of_transformers() -> None:
    names = ("sentiment-analysis", "ner", "text2text-generation", "translation_en_to_de", "zero-shot-classification")
    assert all(InferTask.check_task_valid(name) for name in (*names, "text-generation", "fill-mask"))
    assert not InferTask.check_task_valid("translation_of_words")


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("t5")
    return folder, *write_t5(folder)


def test_texts_of_t5_are_those_of_transformers(t5: tuple[Path, Any, Any]) -> None:
    folder, model, tokenizer = t5

    def expected(text: str, **options: Any) -> str:
        ids = torch.tensor([tokenizer.encode(text)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        result: str = tokenizer.decode(out[0], skip_special_tokens=True)
        return result

    with LLM(folder, mode="eager", limits=LIMITS) as llm:
        translate = pipeline("translation_en_to_de", llm)
        text = expected("to german : the cat", num_beams=3, max_length=9)
        assert translate("the cat") == [{"translation_text": text}]
        assert translate(["the cat"]) == [{"translation_text": text}]
        summary = expected("the cat w3", num_beams=1, max_new_tokens=6)
        found = pipeline("summarization", llm)("the cat w3", num_beams=1, max_new_tokens=6)
        assert found == [{"summary_text": summary}]
        words = {"min_length": 5, "bad_words_ids": [[0], [2]]}
        text = expected("to german : the cat", num_beams=3, max_length=9, **words)
        assert text
        assert translate("the cat", **words) == [{"translation_text": text}]
        text = expected("w1 w2", num_beams=4, max_new_tokens=5, min_new_tokens=3)
        found = pipeline("text2text-generation", llm)("w1 w2", max_new_tokens=5, min_new_tokens=3)
        assert found == [{"generated_text": text}]


def test_generation_of_a_yaml_file_holds_for_t5(t5: tuple[Path, Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "t5.yaml"
    config = "do_sample: false, max_new_tokens: 2, repetition_penalty: 1.5"
    path.write_text(f"load_checkpoint: {t5[0]}\nmodel:\n  model_config: {{{config}}}\n")
    options = {"do_sample": False, "max_new_tokens": 2, "repetition_penalty": 1.5}
    with pipeline("translation_en_to_de", path, backend="eager", return_tensors=True) as of_file:
        own = pipeline("translation_en_to_de", of_file.llm, return_tensors=True)
        assert of_file("the cat") == own("the cat", **options)
        assert of_file("the cat", max_new_tokens=4) == own("the cat", **(options | {"max_new_tokens": 4}))
        assert len(own("the cat")[0]["translation_token_ids"]) > len(of_file("the cat")[0]["translation_token_ids"])


PAGE = ROOT / "docs" / "guides" / "tasks.md"
FOLDERS = {
    "my-sentiment": ("ForSequenceClassification", {"num_labels": 2}),
    "my-nli": ("ForSequenceClassification", _IDS),
    "my-ner": ("ForTokenClassification", {"num_labels": 5, "id2label": _TAGS}),
    "my-answers": ("ForQuestionAnswering", {}),
    "my-bert": ("ForMaskedLM", {}),
}


@pytest.mark.long
def test_the_examples_of_the_page_run(
    t5: tuple[Path, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, (kind, changes) in FOLDERS.items():
        write_folder(tmp_path / name, kind, max_len=64, **changes)
    (tmp_path / "my-t5").symlink_to(t5[0])
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    examples = [block for block in blocks(PAGE) if block.test.endswith("::test_the_examples_of_the_page_run")]
    assert examples
    for block in examples:
        exec(block.code, names)  # noqa: S102
