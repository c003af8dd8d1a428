"""The chat of the page: streams, settings, models, keys, status."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.serving.settings import GatewaySettings
from tests.support.http_service import Service, until
from tests.support.web_page_actions import ask, kept_answer, sent, slow_down

pytestmark = pytest.mark.long

KEY = "a-key-that-is-long-enough-for-the-service"


@pytest.fixture
def serve_plain(make_llm) -> Iterator[Service]:
    """A service over a model that has no chat template."""
    service = Service({"plain": make_llm()})
    yield service
    service.close()


def test_an_answer_streams_and_tells_its_speed(serve, visit):
    service = serve("fake")
    slow_down(service)
    page = visit(service.url)
    page.click("#show-panel")
    page.fill("#max_tokens", "20")
    said = "the cat " * 20  # long enough to fill a page of the cache
    path, body = sent(page, lambda: ask(page, said))
    assert path == "chat/completions"
    assert body["messages"] == [{"role": "user", "content": said}]
    foot = page.locator("article.assistant .foot")
    foot.wait_for()
    for words in ("tokens/s", "first token", "tokens"):
        assert words in foot.inner_text()
    assert page.locator("article.assistant > .text").text_content()
    answer = kept_answer(page)
    _, body = sent(page, lambda: ask(page, "sat"))
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][1]["content"] == answer != ""
    page.locator("article.assistant .foot").nth(1).wait_for()
    assert "cached" in page.locator(".foot").nth(1).inner_text()


def test_an_answer_that_came_at_once_tells_its_speed_too(serve, visit):
    page = visit(serve("fake").url)
    page.click("#show-panel")
    page.fill("#max_tokens", "2")
    ask(page, "cat")
    page.locator(".foot").wait_for()
    assert "tokens/s" in page.locator(".foot").inner_text()


def test_stop_ends_the_request_and_the_next_turn_works(serve, visit):
    service = serve("fake")
    slow_down(service)
    page = visit(service.url)
    ask(page, "the")
    until(lambda: page.evaluate("document.querySelector('article.assistant .text')?.textContent.length > 3"))
    assert service.num_open >= 1
    page.click("#stop")
    page.locator(".foot").wait_for()
    page.click("#show-panel")
    assert "stopped" in page.locator(".foot").inner_text()
    until(lambda: not service.llms["fake"].engine.scheduler.has_work, "the end of the request")
    page.fill("#max_tokens", "2")
    ask(page, "cat")
    page.locator(".foot").nth(1).wait_for()
    assert "stopped at max tokens" in page.locator(".foot").nth(1).inner_text()


def test_settings_are_sent_kept_and_checked(serve, visit):
    page = visit(serve("fake").url)
    page.click("#show-panel")
    given = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 11}
    for name, value in given.items():
        page.fill(f"#{name}", str(value))
    page.fill("#stop_text", "END")
    page.fill("#system", "Be brief.")
    _, body = sent(page, lambda: ask(page, "cat"))
    assert {name: body[name] for name in given} == given
    assert body["stop"] == ["END"]
    assert "repetition_penalty" not in body
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    page.locator(".foot").wait_for()
    page.reload()
    page.locator("#panel:visible").wait_for()  # as it was left
    assert page.input_value("#top_k") == "7"
    page.fill("#temperature", "-1")
    ask(page, "cat")
    assert page.evaluate("document.activeElement.id") == "temperature"
    assert page.locator("article").count() == 0
    page.click("#defaults")
    _, body = sent(page, lambda: ask(page, "cat"))
    assert set(body) == {"model", "messages", "max_tokens", "stream", "stream_options"}


def test_a_model_without_a_template_continues_the_text(serve_plain, visit):
    page = visit(serve_plain.url)
    until(lambda: page.evaluate("document.getElementById('mode').textContent.includes('continues')"))
    assert page.locator("#system-field").is_hidden()
    path, body = sent(page, lambda: ask(page, "the cat "))
    assert (path, body["prompt"]) == ("completions", "the cat ")
    page.locator(".foot").wait_for()
    assert page.locator(".given").text_content() == "the cat "
    assert len(page.locator("article .text").text_content()) > len("the cat ")


def test_models_are_chosen_and_each_begins_anew(serve, visit):
    page = visit(serve("one", "two").url)
    ask(page, "cat")
    page.locator(".foot").wait_for()
    page.select_option("#model", "two")
    assert page.locator("article").count() == 0
    _, body = sent(page, lambda: ask(page, "cat"))
    assert (body["model"], len(body["messages"])) == ("two", 1)
    page.locator(".foot").wait_for()
    page.click("#fresh")
    assert page.locator("article").count() == 0
    page.locator("#conversations .open").last.click()  # the first conversation, with its model
    page.locator("article").first.wait_for()
    assert page.input_value("#model") == "one"


def test_an_answer_that_was_stopped_goes_on_where_it_ended(serve, visit):
    service = serve("fake")
    page = visit(service.url)
    page.click("#show-panel")
    page.fill("#max_tokens", "6")
    ask(page, "the cat")
    page.locator(".foot").wait_for()
    before = kept_answer(page)
    with page.expect_request("**/v1/completions") as caught:
        page.click(".resume")
    prompt = caught.value.post_data_json["prompt"]
    asked = service.post("/tokenize", messages=[{"role": "user", "content": "the cat"}])["tokens"]
    assert prompt[: len(asked)] == asked
    assert prompt[len(asked) :] == service.post("/tokenize", prompt=before, add_special_tokens=False)["tokens"]
    until(lambda: page.locator("#stop").is_hidden())
    _, body = sent(page, lambda: ask(page, "more"))
    after = body["messages"][1]["content"]
    assert after.startswith(before)
    assert len(after) > len(before)


def test_a_text_that_was_continued_goes_on(serve_plain, visit):
    page = visit(serve_plain.url)
    page.click("#show-panel")
    page.fill("#max_tokens", "4")
    ask(page, "the cat ")
    page.locator(".foot").wait_for()
    before = page.locator("article .text").text_content()
    _, body = sent(page, lambda: page.click(".resume"))
    assert body["prompt"] == before
    page.click("article .edit >> nth=0")
    page.fill(".editor", "a dog ")
    _, body = sent(page, lambda: page.press(".editor", "Enter"))
    assert body["prompt"] == "a dog "
    page.locator(".foot").wait_for()
    assert page.locator(".given").text_content() == "a dog "


def test_text_files_are_attached(serve, visit, tmp_path):
    (tmp_path / "notes.py").write_text("print('```')\n")
    (tmp_path / "data.bin").write_bytes(b"\xff\x00\xfe")
    (tmp_path / "large.txt").write_bytes(b"a" * (1 << 20) + b"a")
    page = visit(serve("fake").url)
    page.set_input_files("#attach-file", [tmp_path / name for name in ("notes.py", "data.bin", "large.txt")])
    page.locator("#files .chip").wait_for()
    until(lambda: "large.txt: expected a text file of at most 1,048,576 bytes" in page.inner_text("#attach-error"))
    assert "data.bin: expected a text file in UTF-8" in page.inner_text("#attach-error")
    assert page.locator("#files .chip").count() == 1
    _, body = sent(page, lambda: ask(page, "Explain."))
    content = "File notes.py:\n````\nprint('```')\n````\n\nExplain."
    assert body["messages"] == [{"role": "user", "content": content}]
    page.locator(".foot").wait_for()
    assert page.locator("#files .chip").count() == 0
    page.click("article.user summary")
    assert "print('```')" in page.inner_text("article.user")


def test_a_refusal_is_shown_and_can_be_retried(serve, visit):
    page = visit(serve("fake").url)
    page.click("#show-panel")
    page.evaluate("document.getElementById('top_p').removeAttribute('max')")  # the page would refuse it by itself
    page.fill("#top_p", "2")
    ask(page, "cat")
    page.locator("article p.error").wait_for()
    assert "top_p" in page.locator("article p.error").inner_text()
    page.fill("#top_p", "0.5")
    page.fill("#max_tokens", "2")
    page.click(".retry")
    page.locator("article p.error").wait_for(state="detached")
    page.locator(".foot").wait_for()
    assert "2 tokens" in page.locator(".foot").inner_text()


def test_the_key_is_asked_for_until_it_is_right(serve, visit, tmp_path):
    (tmp_path / "keys").write_text(f"{KEY}\n")
    (tmp_path / "keys").chmod(0o600)
    page = visit(serve("fake", settings=GatewaySettings(keys_file=tmp_path / "keys")).url)
    for given in ("wrong", KEY):
        page.locator("#key").wait_for()
        assert page.locator("#key-wrong").is_visible() == (given == KEY)
        page.fill("#key", given)
        page.press("#key", "Enter")
        if given != KEY:
            page.locator("#key-wrong").wait_for()
    until(lambda: page.evaluate("document.getElementById('model').value === 'fake'"))
    ask(page, "cat")
    page.locator(".foot").wait_for()


def test_the_live_view_shows_what_runs(serve, visit):
    service = serve("fake")
    slow_down(service)
    page = visit(service.url)
    ask(page, "the")
    page.click("#show-live")
    page.locator(".card").wait_for()
    running = page.locator(".figures div", has=page.locator("dt", has_text="Running")).locator("dd")
    until(lambda: page.evaluate("[...document.querySelectorAll('.figures dd')][0].textContent === '1'"))
    assert running.inner_text() == "1"
    assert "of" in page.locator(".figures div", has_text="Pages in use").inner_text()
    page.click("#show-talk")
    page.click("#stop")
    page.click("#show-live")
    until(lambda: page.evaluate("[...document.querySelectorAll('.figures dd')][0].textContent === '0'"))
    assert "Generated tokens" in page.locator(".card").inner_text()


def test_a_lost_service_is_shown(serve, visit):
    service = serve("fake")
    page = visit(service.url)
    until(lambda: page.evaluate("document.getElementById('model').value === 'fake'"))
    service.close()
    page.click("#show-live")
    until(lambda: page.evaluate("!document.getElementById('notice').hidden"))
    assert "does not respond" in page.locator("#notice").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_down_only(serve, visit, scheme):
    page = visit(serve("a-model-with-quite-a-long-name-for-a-phone").url, 320, 600, color_scheme=scheme)
    ask(page, "cat " * 30 + "W" * 200)
    page.locator(".foot, article p.error").first.wait_for()
    page.click("#show-panel")
    assert page.evaluate("(one => one.scrollWidth <= one.clientWidth)(document.querySelector('.fields'))")
    for view in ("#show-talk", "#show-live"):
        page.click(view)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")


def test_everything_to_press_or_fill_has_a_name(serve, visit):
    page = visit(serve("fake").url)
    page.click("#show-panel")
    nameless = """[...document.querySelectorAll('button, input, select, textarea')].filter(
        (one) => !one.textContent.trim() && !one.labels?.length && !one.ariaLabel).map((one) => one.outerHTML)"""
    assert page.evaluate(nameless) == []
    assert page.locator("html[lang=en]").count() == 1
