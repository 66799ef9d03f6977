"""What the page of the playground shows: figures, colors, sizes, and use by keyboard."""

from typing import TYPE_CHECKING, Any

import pytest
from helpers.browser import visiting
from helpers.playground import (
    HOSTILE,
    ask,
    set_options,
    site_decoder,
    text_of_answer,
    wait_for_answer,
)
from helpers.serving import running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


pytestmark = pytest.mark.browser


def test_everything_works_by_keyboard(page: "Page") -> None:
    assert page.evaluate("() => document.activeElement.id") == "prompt"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#prompt") == "one\ntwo"
    set_options(page, max_tokens="20", temperature="0.9", seed="3")
    page.focus("#prompt")
    page.keyboard.press("Enter")
    wait_for_answer(page)
    assert page.inner_text(".question .body") == "one\ntwo"
    # Backwards from the message field: the answer, whose tokens arrow keys inspect.
    page.keyboard.press("Shift+Tab")
    assert "body" in str(page.evaluate("() => document.activeElement.className"))
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    assert page.locator(".token.selected").get_attribute("data-number") == "1"
    assert "step" in str(page.text_content("#status"))
    seen = []
    page.focus(".skip")
    for _ in range(20):
        outline = "() => getComputedStyle(document.activeElement).outlineStyle"
        name = page.evaluate("() => document.activeElement.id || document.activeElement.className")
        if (
            name
            and name != "skip"
            and page.evaluate("() => document.activeElement.type") != "radio"
        ):
            assert page.evaluate(outline) == "solid", name
        seen.append(name)
        page.keyboard.press("Tab")
    assert {"new-chat", "open-settings", "log", "body", "prompt", "step-back", "tree"} <= set(seen)
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.name") == "system"
    page.keyboard.press("Escape")
    assert page.evaluate("() => document.activeElement.id") == "open-settings"


def test_whatever_the_model_writes_is_text(browser: "Browser") -> None:
    decoder = site_decoder(hostile=True)
    with running(decoder, capacity=2600) as server, visiting(browser, server.root + "/") as page:
        set_options(page, temperature="1", seed="1", max_tokens="120")
        ask(page, "<b>hello</b><script>alert(3)</script>")
        text = text_of_answer(page)
        assert all(own in text for own in HOSTILE)
        assert page.locator("img, .answer script, .answer b, .question b").count() == 0
        assert page.inner_text(".question .body").startswith("<b>hello</b>")
        assert page.evaluate("() => document.documentElement.scrollWidth") == 1280
        token = page.locator(".answer .token", has_text="{{7*7}}").first
        token.scroll_into_view_if_needed()
        page.wait_for_timeout(200)  # scrolling hides the description
        token.hover()
        assert "{{7*7}}" in page.locator("#tip").inner_text()


def test_boxes_of_a_tree_do_not_overlap_and_lines_do_not_cross(page: "Page") -> None:
    script = """async (trees) => {
      const { layOut } = await import("/playground/tree.js");
      const facts = (box) => [box.depth, box.row, box.parent?.row ?? 0];
      return trees.map((tree) => layOut(tree).boxes.map(facts));
    }"""
    trees = []
    for seed in range(30):
        nodes: list[dict[str, Any]] = []
        for number in range(seed):
            parent = (number * 7 + seed * 3) % (number + 1) - 1
            is_accepted = parent == -1 and not any(own["accepted"] for own in nodes)
            nodes.append({"text": f"t{number}", "parent": parent, "accepted": is_accepted})
        trees.append({"root": "r", "nodes": nodes, "next": "n" if seed % 2 else None})
    for boxes in page.evaluate(script, trees):
        assert len({(depth, row) for depth, row, _ in boxes}) == len(boxes)
        for depth, row, above in boxes:
            assert row >= above
            lower = [own for own in boxes if own[0] == depth and own[1] > row]
            assert all(own[2] >= above for own in lower)


def test_the_panel_has_figures_a_legend_and_the_tree(page: "Page") -> None:
    set_options(page, max_tokens="40", temperature="0.9", seed="3")
    ask(page)
    page.locator("#race").wait_for()
    assert float(page.inner_text("#tau")) > 1
    assert float(page.inner_text("#rate")) > 0
    assert "measured on this server with 31 tokens" in page.inner_text("#autoregressive-note")
    legend = [item.split("\n") for item in page.locator("#legend li").all_inner_texts()]
    assert sum(int(item[-1]) for item in legend) == 40
    page.check("[name=colors][value=source]", force=True)
    page.locator("#legend >> text=expert").first.wait_for()
    page.locator(".answer .token[data-depth='1']").last.click()
    assert page.locator(".answer .token.selected").count() == 1
    page.locator("#tree .node.accepted").first.wait_for()
    accepted = page.locator("#tree .node.accepted").count()
    marked = page.locator(".answer .token.same-step:not([data-depth='0'])").count()
    assert 1 <= marked <= accepted
    label = str(page.locator("#tree svg").get_attribute("aria-label"))
    assert "candidates, accepted: " in label
    before = page.inner_text("#step-number")
    page.click("#step-back")
    page.locator(f"#step-number:not(:text-is('{before}'))").wait_for()
    assert page.locator(".answer .token.selected").count() == 0
