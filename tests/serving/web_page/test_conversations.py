"""Conversations that the page keeps in the browser: list, search, rename, delete, export, edit, versions, branches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.http_service import until
from tests.support.web_page_actions import ask, sent

pytestmark = pytest.mark.long


def say(page, *texts: str) -> None:
    for text in texts:
        before = page.locator(".foot").count()
        ask(page, text)
        until(lambda before=before: page.locator(".foot").count() == before + 1)


def titles(page) -> list[str]:
    return page.locator("#conversations .title").all_inner_texts()


def act(page, title: str, name: str) -> None:
    page.locator("#conversations li", has_text=title).locator(".more").click()
    page.locator("#menu:popover-open").wait_for()
    page.click(f"#{name}")


@pytest.fixture
def page(serve, visit, script):
    page = visit(serve("fake").url)
    script(page, "An answer ", "about cats.")
    return page


def test_conversations_are_kept_and_found(page):
    say(page, "First question about birds")
    page.click("#fresh")
    say(page, "Second question", "and more of it")
    assert titles(page) == ["Second question", "First question about birds"]
    page.reload()
    until(lambda: len(titles(page)) == 2)
    assert page.locator("article").count() == 0
    page.locator("#conversations .open").nth(1).click()
    assert page.locator("article").all_inner_texts()[0].startswith("First question about birds")
    assert page.locator("#conversations [aria-current]").inner_text().startswith("First question")
    _, body = sent(page, lambda: ask(page, "go on"))
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user"]
    until(lambda: page.locator(".foot").count() == 2)
    page.fill("#search", "MORE OF")
    assert titles(page) == ["Second question"]
    page.fill("#search", "nothing")
    assert "No conversation" in page.inner_text("#list-note")


def test_a_conversation_is_renamed_and_deleted(page):
    say(page, "First")
    page.click("#fresh")
    say(page, "Second")
    act(page, "First", "rename")
    page.fill("#conversations input", "Birds")
    page.press("#conversations input", "Enter")
    until(lambda: titles(page) == ["Second", "Birds"])
    act(page, "Second", "delete")
    page.click("#confirm button[value='']")
    assert titles(page) == ["Second", "Birds"]
    act(page, "Second", "delete")
    page.click("#confirm-yes")
    until(lambda: titles(page) == ["Birds"])
    assert page.locator("article").count() == 0  # it was open
    page.reload()
    until(lambda: titles(page) == ["Birds"])
    page.click("#delete-all")
    page.click("#confirm-yes")
    until(lambda: titles(page) == [])


def test_a_conversation_is_exported_and_imported(page, tmp_path):
    page.click("#show-panel")
    page.fill("#system", "Be brief.")
    say(page, "What is a cat?")
    with page.expect_download() as caught:
        act(page, "What is", "export-markdown")
    assert caught.value.suggested_filename == "What-is-a-cat.md"
    text = Path(caught.value.path()).read_text()
    assert text.startswith("# What is a cat?\n\nModel: fake")
    for words in ("## System\n\nBe brief.", "## You\n\nWhat is a cat?", "## Assistant\n\nAn answer about cats."):
        assert words in text
    with page.expect_download() as caught:
        act(page, "What is", "export-json")
    found = json.loads(Path(caught.value.path()).read_text())
    assert (found["model"], found["system"], len(found["turns"])) == ("fake", "Be brief.", 2)
    with page.expect_download() as caught:
        page.click("#export-all")
    caught.value.save_as(tmp_path / "all.json")
    page.set_input_files("#import-file", tmp_path / "all.json")
    until(lambda: titles(page) == ["What is a cat?"] * 2)
    (tmp_path / "wrong.json").write_text('[{"turns": 3}]')
    page.set_input_files("#import-file", tmp_path / "wrong.json")
    until(lambda: "wrong.json: expected conversations" in page.inner_text("#list-note"))


def test_a_message_is_edited_and_its_versions_are_kept(page):
    say(page, "First", "Second")
    page.locator("article.user .edit").first.click()
    assert page.input_value(".editor") == "First"
    page.press(".editor", "Escape")
    assert page.locator("article").count() == 4
    page.locator("article.user .edit").first.click()
    page.fill(".editor", "Changed")
    _, body = sent(page, lambda: page.press(".editor", "Enter"))
    assert body["messages"] == [{"role": "user", "content": "Changed"}]
    until(lambda: page.locator(".foot").count() == 1)
    assert page.locator("article").count() == 2
    versions = page.locator("article.user .versions")
    assert "2 / 2" in versions.inner_text()
    versions.locator(".previous").click()
    assert page.locator("article").count() == 4
    assert "1 / 2" in page.locator("article.user .versions").inner_text()
    page.locator("article.assistant .retry").last.click()
    until(lambda: page.locator("article.assistant .versions").count() == 1)
    assert "2 / 2" in page.locator("article.assistant .versions").inner_text()


def test_a_branch_is_a_conversation_of_its_own(page):
    say(page, "First", "Second")
    page.locator("article.assistant .branch").first.click()
    until(lambda: titles(page) == ["First (branch)", "First"])
    assert page.locator("article").count() == 2
    say(page, "Other")
    page.locator("#conversations .open", has_text="First").last.click()
    until(lambda: page.locator("article").count() == 4)


def test_two_tabs_show_the_same_conversations(page):
    other = page.context.new_page()
    other.goto(page.url)
    say(page, "First")
    until(lambda: titles(other) == ["First"])


def test_without_storage_the_page_works_and_says_so(serve, visit, script):
    page = visit(serve("fake").url)
    page.context.add_init_script(
        "Object.defineProperty(window, 'indexedDB', {get() { throw new Error('off') }});"
        "Object.defineProperty(window, 'localStorage', {get() { throw new Error('off') }});"
        "Object.defineProperty(window, 'sessionStorage', {get() { throw new Error('off') }});"
    )
    page.reload()
    script(page, "An answer.")
    say(page, "First")
    assert titles(page) == ["First"]
    assert "permits no storage" in page.inner_text("#list-note")
