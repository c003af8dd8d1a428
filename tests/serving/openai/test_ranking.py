"""The routes of cross-encoders and of embedding models: what they answer is what LLM answers."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import transformers

from penstock import LLM
from penstock.graph.export import export_bundle
from tests.support.encoders import LIMITS, build, sentence_transformer, write_tokenizer
from tests.support.http_service import Service
from tests.support.serve_command import ask, serving

DOCUMENTS = ["the mats", "sat on the mat", "cats"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("ranker", "embedder")}
    build(transformers.AutoModelForSequenceClassification, "bert", num_labels=1).save_pretrained(made["ranker"])
    write_tokenizer(made["ranker"])
    sentence_transformer(made["embedder"], "pooling_mode_cls_token", has_dense=True)
    return made


@pytest.fixture(scope="module")
def service(folders: dict[str, Path]) -> Iterator[Service]:
    made = Service({name: LLM(folder, mode="eager", limits=LIMITS) for name, folder in folders.items()})
    yield made
    made.close()


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_documents_are_ranked(path: str, service: Service, folders: dict[str, Path]) -> None:
    with LLM(folders["ranker"], mode="eager", limits=LIMITS) as llm:
        expected = llm.rerank("the cat", DOCUMENTS)
    given = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    found = service.post(path, model="ranker", query="the cat", documents=given)
    assert [(one["index"], one["relevance_score"]) for one in found["results"]] == [
        (one.index, one.score) for one in expected
    ]
    assert [one["document"]["text"] for one in found["results"]] == [one.document for one in expected]
    assert found["usage"]["total_tokens"] == sum(one.num_tokens for one in expected)
    short = service.post(path, model="ranker", query="the cat", documents=given, top_n=1, return_documents=False)
    assert short["results"] == [{"index": expected[0].index, "relevance_score": expected[0].score}]
    long = "the " * 150
    assert service.refused(path, model="ranker", query="the", documents=["the", long])[1]["param"] == "documents"
    cut = service.post(path, model="ranker", query="the", documents=[long], truncate_prompt_tokens=50)
    assert cut["usage"]["total_tokens"] == 50
    assert service.refused(path, model="embedder", query="the", documents=["the"])[0] == 400


def test_scores_and_classes_of_pairs(service: Service) -> None:
    ranked = service.post("/rerank", model="ranker", query="the cat", documents=DOCUMENTS)["results"]
    by_index = {one["index"]: one["relevance_score"] for one in ranked}
    for path in ("/score", "/v1/score"):
        found = service.post(path, model="ranker", text_1="the cat", text_2=DOCUMENTS)
        assert [one["score"] for one in found["data"]] == [by_index[i] for i in range(3)]
        one = service.post(path, model="ranker", text_1=["the cat"] * 3, text_2=DOCUMENTS)
        assert one["data"] == found["data"]
        refused = service.refused(path, model="ranker", text_1=["a", "b"], text_2=DOCUMENTS)
        assert refused[1]["param"] == "text_1"
    classes = service.post("/classify", model="ranker", input=["the cat", "mats"])["data"]
    assert [(one["index"], one["label"], one["num_classes"]) for one in classes] == [
        (0, "LABEL_0", 1),
        (1, "LABEL_0", 1),
    ]
    assert service.refused("/classify", model="embedder", input="the")[0] == 400
    assert service.refused("/v1/embeddings", model="ranker", input="the")[0] == 400
    assert service.refused("/v1/completions", model="embedder", prompt="the")[0] == 400


def test_embeddings_by_the_files_of_the_model(service: Service, folders: dict[str, Path]) -> None:
    import openai

    with LLM(folders["embedder"], mode="eager", limits=LIMITS) as llm:
        expected = llm.embed(DOCUMENTS)
        plain, short = llm.embed("cats", prompt_name="plain"), llm.embed("cats", dimensions=7)
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="embedder", input=DOCUMENTS, encoding_format="float")
        for one, mine in zip(found.data, expected, strict=True):
            assert np.array_equal(np.float32(one.embedding), mine.vector)
        other = client.embeddings.create(
            model="embedder", input="cats", encoding_format="float", extra_body={"prompt_name": "plain"}
        )
        assert np.array_equal(np.float32(other.data[0].embedding), plain.vector)
        raw = client.embeddings.with_raw_response.create(
            model="embedder", input="cats", dimensions=7, encoding_format="base64"
        )
    data = np.frombuffer(base64.b64decode(raw.http_response.json()["data"][0]["embedding"]), "<f4")
    assert np.allclose(data, short.vector, atol=1e-6)


def test_long_texts_are_cut_as_the_files_say(tmp_path: Path) -> None:
    sentence_transformer(tmp_path, "pooling_mode_cls_token", has_dense=False)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
    llm = LLM(tmp_path, mode="eager", limits=LIMITS)
    texts = ["the " * 1000, "cats"]
    expected = llm.embed(texts, prompt_name="plain")
    cut = Service({"cut": llm})
    try:
        found = cut.post("/v1/embeddings", model="cut", input=[*texts, "x"], prompt_name="plain")
        for one, vector in zip(found["data"], expected, strict=False):
            assert np.array_equal(np.float32(one["embedding"]), vector.vector)
        assert found["usage"]["prompt_tokens"] == 5 + 4 + 3
        single = cut.post("/v1/embeddings", model="cut", input=texts[0], prompt_name="plain")
        assert single["usage"]["prompt_tokens"] == 5
    finally:
        cut.close()


def test_workers_open_models_without_a_language_head(folders: dict[str, Path], tmp_path: Path) -> None:
    """``penstock serve``, whose workers compute something before they are ready."""
    for name, body, path in (
        ("embedder", {"input": "the cat"}, "/v1/embeddings"),
        ("ranker", {"query": "the cat", "documents": DOCUMENTS}, "/rerank"),
    ):
        export_bundle(folders[name], tmp_path / f"{name}.psm")
        with serving(tmp_path / f"{name}.psm", "--context-len", 96, cwd=tmp_path) as (_, url, _):
            found = ask(url, path, {"model": name, **body})
            rows = ask(url, "/pooling", {"model": name, "input": "the cat", "task": "token_embed"})["data"][0]["data"]
        with LLM(folders[name], mode="eager", limits=LIMITS) as llm:
            plain = "plain" if name == "embedder" else None
            expected = llm.embed("the cat", pooling="all", normalize=True, prompt_name=plain).vector
            assert np.allclose(rows, expected, atol=1e-5)
            if name == "ranker":
                expected = [one.index for one in llm.rerank("the cat", DOCUMENTS)]
                assert [one["index"] for one in found["results"]] == expected
            else:
                vector = llm.embed("the cat", normalize=True).vector
                assert np.allclose(found["data"][0]["embedding"], vector, atol=1e-5)
