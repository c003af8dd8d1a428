"""``LLM.generate`` with the streamers of transformers, and Penstock's compared with theirs."""

from __future__ import annotations

import io
import os
from threading import Thread

import pytest

from penstock import LLM, SamplingParams, TextStreamer
from penstock.errors import InvalidArgumentError
from tests.support.command import DEMO, FOLDER
from tests.support.errors import raises

PROMPT = "def add(a, b):\n    # naïve ½ Fläche\n"
PARAMS = SamplingParams(max_tokens=40, temperature=0.9, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO) as made:
        yield made


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


class Recorder:
    """Records calls, and raises on demand."""

    def __init__(self, fail_at: int = -1) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.ids: list[int] = []
        self.num_ends = 0
        self.fail_at = fail_at

    def put(self, value):
        if len(self.shapes) == self.fail_at:
            raise OSError("planted")
        self.shapes.append(value.shape)
        self.ids += value.reshape(-1).tolist()

    def end(self):
        self.num_ends += 1


def test_a_streamer_gets_the_prompt_and_each_token(llm):
    recorder = Recorder()
    result = llm.generate(PROMPT, PARAMS, streamer=recorder)
    plain = llm.generate(PROMPT, PARAMS)
    assert (result.token_ids, result.text) == (plain.token_ids, plain.text)
    assert recorder.ids == [*result.prompt_token_ids, *result.token_ids]
    assert recorder.shapes == [(1, len(result.prompt_token_ids)), *[(1,)] * 40]
    assert recorder.num_ends == 1
    assert llm.generate([PROMPT], PARAMS, streamer=Recorder())[0].token_ids == plain.token_ids


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_transformers_text_streamer_and_ours_print_the_same(llm, theirs, skip_prompt, capsys):
    from transformers import TextStreamer as TheirTextStreamer

    result = llm.generate(PROMPT, PARAMS, streamer=TheirTextStreamer(theirs, skip_prompt, skip_special_tokens=True))
    printed = capsys.readouterr().out
    assert printed == ("" if skip_prompt else PROMPT) + result.text + "\n"
    llm.generate(PROMPT, PARAMS, streamer=TextStreamer(llm.tokenizer, skip_prompt))
    assert capsys.readouterr().out == printed


def test_transformers_iterator_streamer_streams_the_answer(llm, theirs):
    from transformers import TextIteratorStreamer

    streamer = TextIteratorStreamer(theirs, skip_prompt=True, timeout=600, skip_special_tokens=True)
    thread = Thread(target=llm.generate, args=(PROMPT, PARAMS), kwargs={"streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == llm.generate(PROMPT, PARAMS).text
    assert len(pieces) > 5


@pytest.mark.parametrize("fail_at", [0, 3])
def test_exceptions_of_a_streamer_end_the_request(llm, fail_at):
    recorder = Recorder(fail_at)
    with pytest.raises(OSError, match="planted"):
        llm.generate(PROMPT, PARAMS, streamer=recorder)
    assert recorder.num_ends == 1
    assert not llm.engine.has_work
    assert llm.engine.figures().num_held_pages == 0


@pytest.mark.parametrize(
    ("prompts", "params", "more", "param", "fact"),
    [
        ([PROMPT, PROMPT], PARAMS, {}, "n", "has 2"),
        (PROMPT, SamplingParams(n=3), {}, "n", "has 3"),
        ([], PARAMS, {}, "n", "has 0"),
        ("", PARAMS, {}, "prompt", "at least one token"),
        (PROMPT, PARAMS, {"progress": True}, "progress", "False"),
    ],
)
def test_an_unstreamable_call_is_refused_and_ends_the_streamer(llm, prompts, params, more, param, fact):
    recorder = Recorder()
    with raises(InvalidArgumentError, param=param, match=fact):
        llm.generate(prompts, params, streamer=recorder, **more)
    assert (recorder.ids, recorder.num_ends) == ([], 1)


def test_objects_without_put_and_end_are_refused(llm):
    for streamer in (print, object(), 1):
        with raises(InvalidArgumentError, param="streamer", match=r"put\(token_ids\)"):
            llm.generate(PROMPT, PARAMS, streamer=streamer)
    with raises(InvalidArgumentError, param="tokenizer"):
        TextStreamer("gpt2")


def test_our_streamer_takes_what_transformers_puts(llm):
    torch = pytest.importorskip("torch")
    ids = llm.tokenizer.encode("½ é日")
    printed = io.StringIO()
    streamer = TextStreamer(llm.tokenizer, file=printed)
    for value in (torch.tensor([ids]), *(torch.tensor([token]) for token in ids), ids[:1], ids[1:]):
        streamer.put(value)
    streamer.end()
    assert printed.getvalue() == "½ é日" * 3 + "\n"
    for value in (torch.tensor([ids, ids]), [[1], [2]], "x", None, [1.5]):
        with raises(InvalidArgumentError, param="value"):
            streamer.put(value)


def test_a_model_never_drives_the_terminal(llm):
    leader, follower = os.openpty()
    with os.fdopen(follower, "w", encoding="utf-8") as terminal:
        streamer = TextStreamer(llm.tokenizer, file=terminal)
        streamer.put(llm.tokenizer.encode("a\x1b[2Jb\x7f\u0080\u009b2J\u009f\u00a0"))
        streamer.end()
        printed = b""
        while not printed.endswith(b"\n"):
            printed += os.read(leader, 100)
        assert printed.decode() == "a\ufffd[2Jb\ufffd\ufffd\ufffd2J\ufffd\u00a0\r\n"
    os.close(leader)
