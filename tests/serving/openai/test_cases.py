"""Cases that the tests of llama.cpp's server and of vLLM's entry points cover, as far as they apply here."""

from __future__ import annotations

import json
import socket

import pytest

from penstock import LLM, SamplingParams
from penstock.serving.request_fields import SAMPLING
from tests.support.command import DEMO
from tests.support.fake_model import llms_over_fakes
from tests.support.http_service import ENDLESS, ROOMY, is_idle, post, until
from tests.support.services import CHAT_FILES

PROMPT = "def add(a, b):"
USER = [{"role": "user", "content": "the cat"}]
HOT = {"temperature": 1.0, "seed": 7, "max_tokens": 24}
FIELDS = {
    "max_tokens": 5,
    "min_tokens": 20,
    "temperature": 0.3,
    "top_p": 0.6,
    "top_k": 3,
    "min_p": 0.2,
    "typical_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.5,
    "logit_bias": {"200": 30, "201": -100},
    "allowed_token_ids": list(range(40, 90)),
    "bad_words": ["a", "e"],
    "seed": 8,
    "n": 3,
    "stop": ["a", "Z/#"],
    "stop_token_ids": list(range(100, 200)),
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "json_schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 9},
    "json_object": True,
    "regex": "[a-z]{3}-[0-9]{40}",
    "choice": ["yes", "no"],
    "grammar": 'start: "<" /[a-z]{30}/ ">"',
    "skip_special_tokens": False,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[token] for token in range(60, 250)],
    "forced_bos_token_id": 66,
    "forced_eos_token_id": 66,
}
MAY_CHANGE_NOTHING = ("min_tokens", "ignore_eos", "skip_special_tokens", "forced_bos_token_id")


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO) as made:
        yield made


@pytest.fixture(scope="module")
def own():
    """The model of the service ``fake``, without a service."""
    with llms_over_fakes() as make:
        yield make(files=CHAT_FILES)


def texts_of(events: list[dict], count: int = 1) -> list[str]:
    texts = [""] * count
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return texts


@pytest.mark.parametrize("name", [name for name in SAMPLING if name != "thinking_token_budget"])
def test_every_field_of_sampling_is_honoured(demo, fake, llm, own, name):
    """By both routes, whole and streamed: the tokens are the engine's with the same field, and not those without it."""
    extra = {"stop": ["a", "Z/#"]} if name == "include_stop_str_in_output" else {}
    body = HOT | extra | {name: FIELDS[name]}
    n = body.get("n", 1)
    for service, path, prompt, model in (
        (demo, "/v1/completions", {"prompt": PROMPT}, llm),
        (fake, "/v1/chat/completions", {"messages": USER}, own),
    ):
        text = PROMPT if model is llm else "<user>the cat<a>"
        wanted = {"logit_bias": {200: 30, 201: -100}} if name == "logit_bias" else {}
        found = model.generate(text, SamplingParams(**body | wanted))
        whole = service.post(path, **prompt, **body)
        got = [one["text"] if "text" in one else one["message"]["content"] for one in whole["choices"]]
        assert got == [one.text for one in found.choices]
        assert [one["finish_reason"] for one in whole["choices"]] == [one.finish_reason for one in found.choices]
        assert whole["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in found.choices)
        assert texts_of(service.events(path, **prompt, **body), n) == got
        plain = model.generate(text, SamplingParams(**HOT | extra))
        if model is own and name not in MAY_CHANGE_NOTHING:
            assert [one.token_ids for one in found.choices] != [plain.token_ids] or found.text != plain.text
    assert set(FIELDS) == set(SAMPLING) - {"thinking_token_budget"}  # of models with thoughts: test_tools.py


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"stream": True, "stream_options": True}, "stream_options"),
        ({"stream": True, "logprobs": 30}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
        ({"prompt": [[1], [-1]]}, "prompt[1][0]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[], []]}, "prompt[0]"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt[1]"),
        ({"logit_bias": {"1": 101}}, "logit_bias['1']"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": [[1, -100]]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"max_tokens": 0, "echo": True, "best_of": 2}, "best_of"),
        ({"structured_outputs": {"regex": "[.*"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_grammar": "x"}, "guided_grammar"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ],
)
def test_unsupported_completion_fields_are_refused(demo, fields, param):
    status, error = demo.refused("/v1/completions", **{"prompt": PROMPT} | fields)
    assert (status, error["type"], error["param"] and error["param"].partition("[")[0]) == (
        400, "invalid_request_error", param.partition("[")[0],
    )  # fmt: skip
    assert error["param"] in (param, param.partition("[")[0])


@pytest.mark.parametrize(
    "messages",
    [
        None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}], [{"content": "hello"}],
        [{"role": "user", "content": "x"}, {}], [{"role": "my-role", "content": "x"}], [{"role": "user"}],
        [{"role": "user", "content": None}], [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"text": "x"}]}],
        [{"role": "system", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
        [{"role": "user", "content": "x", "extra_field": "0"}],
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_malformed_conversations_are_refused(fake, path, messages):
    status, error = fake.refused(path, messages=messages)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["param"].startswith("prompt" if messages is None and path == "/tokenize" else "messages")


def test_null_is_as_good_as_absent(demo, fake):
    names = [*SAMPLING, "stream", "stream_options", "user", "suffix", "logprobs", "best_of", "echo"]
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    expected = demo.post("/v1/completions", **body)["choices"]
    assert demo.post("/v1/completions", **dict.fromkeys(names) | body)["choices"] == expected
    names = ["tools", "tool_choice", "response_format", "functions", "top_logprobs", "metadata", "reasoning_effort"]
    body = {"messages": USER, "max_tokens": 4, "temperature": 0}
    expected = fake.post("/v1/chat/completions", **body)["choices"]
    assert fake.post("/v1/chat/completions", **dict.fromkeys(names) | body)["choices"] == expected
    text = {"response_format": {"type": "text"}, "modalities": ["text"], "max_completion_tokens": 4}
    assert fake.post("/v1/chat/completions", **body | text)["choices"] == expected


HARMLESS = {
    "metadata": {"run": "7"},
    "parallel_tool_calls": True,
    "prompt_cache_key": "k",
    "reasoning_effort": "none",
    "safety_identifier": "u",
    "service_tier": "auto",
    "store": False,
    "functions": [],
    "tool_choice": "none",
    "tools": [],
    "verbosity": "medium",
}


def test_fields_that_change_nothing_are_taken(fake):
    body = {"messages": USER, "max_tokens": 4, "temperature": 0}
    expected = fake.post("/v1/chat/completions", **body)["choices"]
    assert fake.post("/v1/chat/completions", **body | HARMLESS)["choices"] == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metadata", {"a": 1}),
        ("metadata", {str(number): "" for number in range(17)}),
        ("parallel_tool_calls", "yes"),
        ("reasoning_effort", "high"),
        ("service_tier", "priority"),
        ("store", True),
        ("tool_choice", "required"),
        ("verbosity", "low"),
    ],
)
def test_values_that_would_change_something_are_refused(fake, name, value):
    status, error = fake.refused("/v1/chat/completions", messages=USER, **{name: value})
    assert status == 400
    assert error["param"].startswith(name)


@pytest.mark.parametrize("with_usage", [False, True])
def test_the_events_of_a_conversation(fake, with_usage):
    """One id, the role once for each answer and first, the reason once and last, usage in an event of its own."""
    options = {"stream_options": {"include_usage": with_usage}}
    events = fake.events("/v1/chat/completions", messages=USER, max_tokens=6, n=2, ignore_eos=True, **options)
    assert {(one["object"], one["model"]) for one in events} == {("chat.completion.chunk", "fake")}
    assert len({(one["id"], one["created"], one["system_fingerprint"]) for one in events}) == 1
    if with_usage:
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 12
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 12
    assert all(("usage" in one) == with_usage and one.get("usage") is None for one in events)
    for index in range(2):
        first, *rest = [one["choices"][0] for one in events if one["choices"][0]["index"] == index]
        assert (first["delta"], first["finish_reason"]) == ({"role": "assistant", "content": ""}, None)
        assert all("role" not in one["delta"] for one in rest)
        assert [one["finish_reason"] for one in rest] == [None] * (len(rest) - 1) + ["length"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_top", [0, 4])
def test_log_probabilities_of_a_conversation_spell_its_text(fake, stream, num_top):
    asked = {"messages": USER, "logprobs": True, "top_logprobs": num_top, **HOT}
    if stream:
        events = fake.events("/v1/chat/completions", **asked)
        text = texts_of(events)[0]
        entries = [
            e for one in events if one["choices"][0]["logprobs"] for e in one["choices"][0]["logprobs"]["content"]
        ]
    else:
        (choice,) = fake.post("/v1/chat/completions", **asked)["choices"]
        text, entries = choice["message"]["content"], choice["logprobs"]["content"]
    assert len(entries) == 24
    spelled = b"".join(bytes(one["bytes"]) for one in entries)
    assert spelled.decode("utf-8", "replace") == text
    for one in entries:
        assert one["logprob"] <= 0
        assert len(one["top_logprobs"]) == num_top
        values = [top["logprob"] for top in one["top_logprobs"]]
        assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("given", [PROMPT, [300, 301, 302, 303]])
@pytest.mark.parametrize("num_top", [0, 1])
def test_log_probabilities_behind_an_echo(demo, llm, given, num_top):
    (choice,) = demo.post("/v1/completions", prompt=given, max_tokens=5, echo=True, logprobs=num_top)["choices"]
    found = choice["logprobs"]
    text = given if isinstance(given, str) else llm.tokenizer.decode(given)
    assert choice["text"].startswith(text)
    sizes = {len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert sizes == {len(llm.tokenizer.encode(given) if isinstance(given, str) else given) + 5}
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert all(len(top) >= num_top for top in found["top_logprobs"][1:])
    assert found["text_offset"] == sorted(found["text_offset"])


def test_seeded_answers_do_not_depend_on_other_requests(demo):
    """The same seed gives the same answer alone, beside others and after them; other seeds give others."""
    body = {"prompt": PROMPT, **HOT}
    alone = demo.post("/v1/completions", **body)["choices"][0]["text"]
    several = demo.post("/v1/completions", **body | {"prompt": ["import", PROMPT, "class", PROMPT]})["choices"]
    assert [several[1]["text"], several[3]["text"]] == [alone, alone]
    assert demo.post("/v1/completions", **body, cache_salt="new")["choices"][0]["text"] == alone
    assert len({demo.post("/v1/completions", **body | {"seed": seed})["choices"][0]["text"] for seed in range(4)}) > 2


def test_options_of_a_request_are_honoured(demo, llm):
    ids = llm.tokenizer.encode(PROMPT * 20)
    body = {"prompt": ids, "max_tokens": 3, "temperature": 0}
    cached = [
        demo.post("/v1/completions", **body, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ("one", "one", "two")
    ]
    assert cached[0] == cached[2] == 0 < cached[1]
    cut = demo.post("/v1/completions", **body, truncate_prompt_tokens=7)
    assert cut["usage"]["prompt_tokens"] == 7
    expected = demo.post("/v1/completions", **body | {"prompt": ids[-7:]})
    assert cut["choices"] == expected["choices"]
    assert demo.post("/v1/completions", **body, priority=-5, user="somebody")["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("messages", [USER * 1000])
def test_a_conversation_that_is_too_long(fake, stream, messages):
    status, error = fake.refused("/v1/chat/completions", messages=messages, stream=stream)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "512" in error["message"]


def test_more_than_the_context_holds_is_not_made(demo, llm):
    """What is left of the context bounds an answer; a prompt that fills it is refused."""
    most = demo.post("/tokenize", prompt="x")["max_model_len"]
    ids = (llm.tokenizer.encode(PROMPT) * most)[: most - 3]
    found = demo.post("/v1/completions", prompt=ids, max_tokens=100, ignore_eos=True)
    assert 1 <= found["usage"]["completion_tokens"] <= 4
    assert found["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "given",
    ["", [], {}, {"content": "x"}, [12, "x", 34], ["x", [1]], [[1], ["x"]], [""], [1.5], None, 5, [[]], "x " * 90_000],
)
def test_inputs_without_an_embedding_are_refused(demo, given):
    status, error = demo.refused("/v1/embeddings", input=given)
    assert (status, error["param"].partition("[")[0]) == (400, "input")


def test_embeddings_of_equal_and_of_several_texts(demo):
    texts = ["x = 1", PROMPT, "x = 1"]
    found = demo.post("/v1/embeddings", input=texts)
    vectors = [one["embedding"] for one in found["data"]]
    assert vectors[0] == vectors[2] != vectors[1]
    assert [one["index"] for one in found["data"]] == [0, 1, 2]
    assert all(abs(sum(x * x for x in one) - 1) < 1e-5 for one in vectors)
    assert demo.post("/v1/embeddings", input=texts[1])["data"][0]["embedding"] == vectors[1]
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 0
    raw = demo.post("/v1/embeddings", input=texts[1], normalize=False, pooling="last")["data"][0]["embedding"]
    assert abs(sum(x * x for x in raw) - 1) > 1e-3
    short = demo.post("/v1/embeddings", input=texts[1], dimensions=3)["data"][0]["embedding"]
    assert len(short) == 3
    assert abs(sum(x * x for x in short) - 1) < 1e-5
    for wrong in (0, 1 << 20):
        assert demo.refused("/v1/embeddings", input="x", dimensions=wrong)[1]["param"] == "dimensions"
    assert demo.refused("/v1/embeddings", input="x", prompt_name="x")[1]["param"] == "prompt_name"
    assert demo.refused("/rerank", query="x", documents=["y"])[0] == 400


@pytest.mark.parametrize("text", ["", "x", PROMPT, "für 日本 \U0001f600 e\u0301", "\x00\r\n\t", "<s></s>", " a  b "])
def test_texts_survive_their_tokens(demo, text):
    found = demo.post("/tokenize", prompt=text, return_token_strs=True, add_special_tokens=False)
    assert len(found["tokens"]) == len(found["token_strs"]) == found["count"]
    assert demo.post("/detokenize", tokens=found["tokens"])["prompt"] == text
    assert demo.refused("/detokenize", tokens=[10**6])[1]["param"] == "tokens"


def test_conversations_become_tokens(fake):
    whole = fake.post("/tokenize", messages=USER)["tokens"]
    assert fake.post("/detokenize", tokens=whole)["prompt"] == "<user>the cat<a>"
    closed = fake.post("/tokenize", messages=USER, add_generation_prompt=False)["tokens"]
    assert fake.post("/detokenize", tokens=closed)["prompt"] == "<user>the cat"
    answer = fake.post("/v1/chat/completions", messages=USER, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == len(whole)


def test_a_crowd_that_gives_up_leaves_the_service_free(serve):
    """More requests than there are places, each for more than anybody waits for, and all clients gone."""
    service = serve(max_requests=4, **ROOMY)
    crowd: list[socket.socket] = []
    for number in range(60):
        crowd.append(service.connect())
        crowd[-1].sendall(post("/v1/completions", ENDLESS | {"stream": number % 2 == 0, "n": 1 + number % 3}))
    until(lambda: service.num_open == 60)
    for connection in crowd:
        connection.close()
    until(lambda: is_idle(service), "the end of what nobody waits for")
    assert service.post("/v1/completions", prompt="the", max_tokens=3)["usage"]["completion_tokens"] == 3


def test_the_questions_of_an_evaluation_find_its_accuracy(demo, llm):
    """Asked as lm-eval's local-completions asks: token ids, an echo and a token more, many prompts in a request."""
    folder = DEMO.parents[1]
    lines = (folder / "examples" / "evaluation" / "python_lines.jsonl").read_text().splitlines()
    documents = [json.loads(line) for line in lines]
    encode = llm.tokenizer.encode
    pairs = [(encode(one["code"]), encode(one["code"] + choice)) for one in documents for choice in one["choices"]]
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = demo.post("/v1/completions", prompt=[whole for _, whole in pairs], **asked)["choices"]
    assert [one["index"] for one in choices] == [*range(len(pairs))]
    sums = iter(
        sum(one["logprobs"]["token_logprobs"][len(context) : -1])
        for one, (context, _) in zip(choices, pairs, strict=True)
    )
    right = 0
    for one in documents:
        likelihoods = [next(sums) for _ in one["choices"]]
        right += likelihoods.index(max(likelihoods)) == one["answer"]
    table = (folder / "docs" / "guides" / "evaluation.md").read_text()
    assert f"acc     |↑  |{right / len(documents):.4f}|" in table


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_id_that_a_client_gives_is_the_answers(fake, path):
    body = {"max_tokens": 2, "model": "fake"} | ({"prompt": "x"} if "chat" not in path else {"messages": USER})
    for stream in (False, True):
        status, headers, data = fake.ask("POST", path, body | {"stream": stream}, {"X-Request-Id": "mine.1"})
        assert (status, headers["x-request-id"]) == (200, "mine.1")
        first = json.loads(data.partition(b"\n\n")[0].removeprefix(b"data: "))
        assert first["id"].partition("-")[2] == "mine.1"


def test_one_field_is_counted_once(serve):
    """What the metrics add up is what the answers' usage says."""
    service = serve("fake")
    answers = [
        service.post("/v1/completions", prompt="the cat", max_tokens=5, n=2),
        service.post("/v1/chat/completions", messages=USER, max_tokens=3),
        service.events("/v1/completions", prompt="a", max_tokens=4, stream_options={"include_usage": True})[-1],
    ]
    lines = service.ask("GET", "/metrics")[2].decode().splitlines()
    values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
    label = '{model_name="fake",engine="0"}'
    for metric, field in (("prompt_tokens", "prompt_tokens"), ("generation_tokens", "completion_tokens")):
        assert values[f"vllm:{metric}_total{label}"] == sum(one["usage"][field] for one in answers)
    for metric in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_prompt_tokens"):
        assert values[f"vllm:{metric}_count{label}"] == 3
