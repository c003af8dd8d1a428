"""Answers on the page: Markdown, code, formulas; nothing in a text is markup or a script."""

from __future__ import annotations

import pytest

from tests.support.http_service import until
from tests.support.web_page_actions import ask, slow_down

pytestmark = pytest.mark.long

TEXT = r"""## Roots

The roots of $ax^2 + bx + c = 0$ are

$$x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$$

and \(\lambda\), \[ \left\| \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} \right\| = \sqrt{\sum_{i=1}^n \lambda_i} \]

It costs $5 and $10. An error: $\frac{1$, and $\enclose{x}{\boxed{\cancel{y}}}$.

| name | count |
|:---|---:|
| a | 1 |

```python
def add(a, b):
    return a + b  # "<b>"
```

1. one
   - [x] two, `code`, **bold**, [a link](https://example.org/), ![a picture](https://example.org/x.png)
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (360, 740)])
def test_markdown_is_set(serve, visit, script, scheme, width, height):
    page = visit(serve("fake").url, width, height, color_scheme=scheme)
    script(page, *(TEXT[at : at + 5] for at in range(0, len(TEXT), 5)))
    ask(page, "How?")
    page.locator(".foot").wait_for()
    answer = page.locator("article.assistant > .text")
    until(lambda: answer.locator(".katex-html").count() >= 5)
    assert answer.locator(".katex-display").count() == 2
    assert "$5 and $10" in answer.inner_text()
    assert answer.locator("h2").inner_text() == "Roots"
    assert answer.locator("td").all_inner_texts() == ["a", "1"]
    assert answer.locator("td").nth(1).evaluate("e => getComputedStyle(e).textAlign") == "right"
    assert answer.locator(".code-head span").inner_text() == "python"
    until(lambda: answer.locator(".hljs-keyword").count() == 2)
    assert answer.locator("pre").inner_text().startswith('def add(a, b):\n    return a + b  # "<b>"')
    for link in answer.locator("a").all():
        assert link.get_attribute("rel") == "noopener noreferrer"
    assert answer.locator("img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.evaluate("document.fonts.ready")
    assert "KaTeX_Main" in page.evaluate("[...document.fonts].filter(f => f.status === 'loaded').map(f => f.family)")


def test_code_is_copied(serve, visit, script):
    page = visit(serve("fake").url, permissions=["clipboard-read", "clipboard-write"])
    script(page, TEXT)
    ask(page, "How?")
    page.locator(".foot").wait_for()
    page.click("article .code-head .copy")
    until(lambda: page.locator("article .code-head .copy").get_attribute("aria-label") == "Copied")
    assert page.evaluate("navigator.clipboard.readText()") == 'def add(a, b):\n    return a + b  # "<b>"'
    page.click(".foot .copy")
    until(lambda: page.evaluate("navigator.clipboard.readText()") == TEXT)


def test_a_models_text_is_never_markup(serve, visit, script):
    text = (
        "<img src=x onerror=alert(1)> <b style='color:red'>bold</b>\n\n<div>block</div>\n\n"
        "[link](javascript:alert(2)) [other](data:text/html,x) ![p](data:image/svg+xml,x)\n\n"
        "```html\n<script>alert(3)</script>\n```\n\n"
        '```x" onclick="alert(4)\ncode\n```\n\n'
        "$\\href{javascript:alert(5)}{x} \\htmlStyle{color:red}{y} \\includegraphics{https://example.org/x.png}$"
    )
    page = visit(serve("fake").url)
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    script(page, text)
    ask(page, "How?")
    page.locator(".foot").wait_for()
    answer = page.locator("article.assistant > .text")
    until(lambda: answer.locator(".katex").count() == 1)
    assert answer.locator("img, script, b, div:not(.code, .code-head), [onclick], [onerror]").count() == 0
    assert answer.locator("a[href]").count() == 0
    assert answer.inner_text().startswith("<img src=x onerror=alert(1)> <b style='color:red'>bold</b>")
    assert "<div>block</div>" in answer.inner_text()
    assert "<script>alert(3)</script>" in answer.locator("pre").first.inner_text()


def test_blocks_that_are_complete_keep_their_nodes(serve, visit):
    """So a selection, and the scroll position of code, live while the answer grows."""
    service = serve("fake")
    slow_down(service)
    page = visit(service.url)
    ask(page, "the")
    until(lambda: page.evaluate("document.querySelector('article.assistant .text')?.textContent.length > 3"))
    page.evaluate("window.known = document.querySelector('article.assistant')")
    page.click("#stop")
    page.locator(".foot").wait_for()
    assert page.evaluate("window.known.isConnected")
