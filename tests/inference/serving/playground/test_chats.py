"""Chats in a real browser: streams, stops, reloads, errors, keys."""

from typing import TYPE_CHECKING, Any

import pytest
from helpers.browser import Visit, visiting
from helpers.playground import (
    Site,
    ask,
    expected_answer,
    set_options,
    site_decoder,
    text_of_answer,
    wait_for_answer,
)
from helpers.serving import running
from helpers.slow_drafter import SlowDrafter

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


pytestmark = pytest.mark.browser

KEY = "a-key-of-the-tests"


def test_a_stream_appears_piece_by_piece_with_the_depths_of_the_interface(
    page: "Page", site: Site
) -> None:
    set_options(page, temperature="0.7", seed="3", max_tokens="60")
    site.drafter.seconds = 0.02
    lengths = set()
    ask(page, wait=False)
    while page.locator(".answer[aria-busy=true]").count():
        lengths.add(len(text_of_answer(page)))
    site.drafter.seconds = 0.0
    expected = expected_answer(site, temperature=0.7, seed=3, max_tokens=60)
    assert len(lengths) >= 3
    assert text_of_answer(page) == expected["text"]
    depths = "all => all.map(own => Number(own.dataset.depth))"
    assert page.locator(".answer .token").evaluate_all(depths) == expected["depths"]
    assert "60 tokens" in page.inner_text(".answer .footer")


def test_stopping_keeps_the_text_and_frees_the_place(page: "Page", site: Site) -> None:
    set_options(page, max_tokens="2000")
    for how in ("click", "key"):
        site.drafter.seconds = 0.02
        ask(page, wait=False)
        page.locator(".answer:last-child .token").first.wait_for()
        if how == "click":
            page.click("#send")
        else:
            page.keyboard.press("Escape")
        wait_for_answer(page)
        assert "stopped" in page.locator(".answer .footer").last.inner_text()
        site.server.wait_until_idle()
        text = text_of_answer(page)
        assert text
        site.drafter.seconds = 0.0
    assert page.locator("#send").inner_text() == "Send"
    set_options(page, max_tokens="5")
    ask(page)
    assert page.locator(".answer").count() == 3
    assert "5 tokens" in page.locator(".answer .footer").last.inner_text()


def test_a_new_chat_forgets_and_a_chat_goes_on(page: "Page", site: Site) -> None:
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda sent: bodies.append(sent.post_data_json) if sent.method == "POST" else None,
    )
    page.click("#open-settings")
    page.uncheck("[name=compare]")
    page.click("#settings .primary")
    set_options(page, max_tokens="6", system="Be short.")
    ask(page, "one")
    first = text_of_answer(page)
    ask(page, "two")
    roles = [message["role"] for message in bodies[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert bodies[-1]["messages"][2]["content"] == first
    site.drafter.seconds = 0.02
    set_options(page, max_tokens="2000")
    ask(page, "endless", wait=False)
    page.locator(".answer:last-child .token").first.wait_for()
    page.click("#new-chat")
    site.drafter.seconds = 0.0
    assert page.inner_text("#send") == "Send"
    set_options(page, max_tokens="6")
    assert page.locator(".message").count() == 0
    assert page.locator("#welcome").is_visible()
    ask(page, "three")
    assert [message["content"] for message in bodies[-1]["messages"]] == ["Be short.", "three"]


def test_without_drafts_every_token_is_the_target_s(page: "Page", site: Site) -> None:
    page.click("#open-settings")
    page.uncheck("[name=drafts]")
    page.click("#settings .primary")
    set_options(page, max_tokens="40", temperature="0")
    ask(page)
    assert page.locator(".answer .token:not([data-depth='0'])").count() == 0
    assert text_of_answer(page) == expected_answer(site, temperature=0, max_tokens=40)["text"]
    assert "without drafts" in page.inner_text(".answer .footer")


def test_a_reload_keeps_nothing(page: "Page", site: Site) -> None:
    site.drafter.seconds = 0.02
    set_options(page, key="secret-key", system="Be short.", max_tokens="2000")
    page.check("[name=colors][value=source]", force=True)
    ask(page, wait=False)
    page.locator(".answer .token").first.wait_for()
    page.reload()
    site.server.wait_until_idle()
    assert page.locator(".message").count() == 0
    values = page.evaluate(
        "() => [...document.getElementById('settings-form').elements].map(own => own.value)"
    )
    assert "secret-key" not in values
    assert "Be short." not in values
    assert page.locator("[name=colors][value=depth]").is_checked()
    assert page.evaluate("() => [localStorage.length, sessionStorage.length, document.cookie]") == [
        0,
        0,
        "",
    ]


def test_a_refused_request_shows_the_reason_and_the_remedy(page: "Page") -> None:
    set_options(page, max_tokens="100000")
    ask(page)
    failure = page.locator(".failure")
    assert "longer than a sequence may be" in failure.inner_text()
    assert "lower max_tokens" in failure.inner_text()
    set_options(page, max_tokens="5")
    page.click(".failure >> text=Try again")
    page.locator(".failure").wait_for(state="detached")
    wait_for_answer(page)
    assert page.locator(".message").count() == 2


def test_a_full_server_says_when_to_try_again(browser: "Browser") -> None:
    decoder = site_decoder()
    assert isinstance(decoder.drafter, SlowDrafter)
    decoder.drafter.seconds = 0.05
    with running(decoder, capacity=1000, places=1, queue=0) as server:
        visit = Visit(browser, server.root + "/")
        first, second = visit.open(), visit.open()
        ask(first, wait=False)
        first.locator(".answer .token").first.wait_for()
        ask(second)
        assert "Too many sequences" in second.inner_text(".failure")
        assert "asks to wait" in second.inner_text(".failure")
        first.bring_to_front()
        first.click("#send")
        wait_for_answer(first)
        decoder.drafter.seconds = 0.0
        server.wait_until_idle()
        second.bring_to_front()
        set_options(second, max_tokens="5")
        second.click(".failure >> text=Try again")
        second.locator(".failure").wait_for(state="detached")
        wait_for_answer(second)
        assert "5 tokens" in second.inner_text(".answer .footer")
        visit.close()


def test_a_key_is_asked_for_and_used(browser: "Browser") -> None:
    decoder = site_decoder()
    with running(decoder, api_keys=(KEY,)) as server, visiting(browser, server.root + "/") as page:
        assert page.inner_text("#state") == "key required"
        ask(page)
        assert "API key is missing or wrong" in page.inner_text(".failure")
        page.click(".failure >> text=Enter a key")
        assert page.evaluate("() => document.activeElement.name") == "key"
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        page.locator("#server[data-state=ready]").wait_for()
        set_options(page, max_tokens="5")
        page.click(".failure >> text=Try again")
        page.locator(".failure").wait_for(state="detached")
        wait_for_answer(page)
        assert "5 tokens" in page.inner_text(".answer .footer")


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back(browser: "Browser") -> None:
    decoder = site_decoder()
    assert isinstance(decoder.drafter, SlowDrafter)
    decoder.drafter.seconds = 0.05
    with running(decoder, capacity=2600, drain_seconds=0.0) as server:
        port = int(server.root.rpartition(":")[2])
        visit = Visit(browser, server.root + "/")
        page = visit.open()
        set_options(page, max_tokens="2000")
        ask(page, wait=False)
        page.locator(".answer .token").first.wait_for()
    wait_for_answer(page)
    assert page.locator(".failure").inner_text() != ""
    assert text_of_answer(page) != ""
    page.locator("#server[data-state=unreachable]").wait_for()
    page.click(".failure >> text=Try again")
    page.locator(".failure >> text=cannot be reached").wait_for()
    visit.problems = [own for own in visit.problems if "ERR_" not in own]
    with running(site_decoder(), capacity=2600, port=port):
        page.locator("#server[data-state=ready]").wait_for()
        set_options(page, max_tokens="5")
        page.click(".failure >> text=Try again")
        page.locator(".failure").wait_for(state="detached")
        wait_for_answer(page)
        assert "5 tokens" in page.inner_text(".answer .footer")
        visit.close()


def test_events_are_found_however_they_are_cut(page: "Page") -> None:
    script = """async ([text, sizes]) => {
      const { events } = await import("/playground/sse.js");
      const bytes = new TextEncoder().encode(text);
      const cut = (size) => new ReadableStream({ start(controller) {
        for (let at = 0; at < bytes.length; at += size) {
          controller.enqueue(bytes.slice(at, at + size));
        }
        controller.close();
      } });
      const found = [];
      for (const size of sizes) {
        const own = [];
        for await (const data of events(cut(size))) own.push(data);
        found.push(own);
      }
      return found;
    }"""
    stream = ': hi\n\ndata: {"a":"ü😀"}\r\n\r\nevent: x\ndata: 1\ndata: 2\n\n\n\n'
    stream += "data:[DONE]\n\ndata: half"
    found = page.evaluate(script, [stream, [1, 2, 3, 7, 1000]])
    assert found == [['{"a":"ü😀"}', "1\n2", "[DONE]"]] * 5
