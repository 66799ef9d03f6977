"""The playground in a real browser: streams, stops, errors, keyboard, colors, sizes."""

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from helpers.browser import Visit, running_browser, visiting
from helpers.models import tiny_drafter, tiny_llama
from helpers.serving import MODEL, Running, running
from helpers.slow_drafter import SlowDrafter
from helpers.templates import CHATML
from helpers.tokenizers import tiny_tokenizer

from inference import SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from jakiro.target.adapter import TargetAdapter

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

KEY = "a-key-of-the-tests"
QUESTION = "def main(argument):"
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "\u202eabc\u202c",
    " مرحبا ",
    "👩‍👩‍👧‍👦",
    "&lt;b&gt; {{7*7}} ${1}",
    "x" * 9000 + " ",
)
COPIES = 20  # of each of these texts, so that they are frequent


class _Site(NamedTuple):
    server: Running
    drafter: SlowDrafter


def _decoder(hostile: bool = False, lookup: bool = False) -> SpeculativeDecoder:
    tokenizer = tiny_tokenizer(CHATML)
    if hostile:
        tokenizer.add_tokens([f"{text}{copy}" for text in HOSTILE for copy in range(COPIES)])
    model = tiny_llama(vocab=len(tokenizer), max_position_embeddings=4096)
    if hostile:  # every token has the same probability
        model.model.norm.weight.data.zero_()
    target = TargetAdapter(model)
    trained = TrainedDrafter.for_target(tiny_drafter(target), target)
    drafter = SlowDrafter(LookupDrafter() if lookup else trained)
    return SpeculativeDecoder(model, drafter, tokenizer, tree="fixed")


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with running_browser() as found:
        yield found


@pytest.fixture(scope="module")
def shared(browser: "Browser") -> Iterator[_Site]:
    """A server; it is started after the browser, so that a missing browser takes no time."""
    decoder = _decoder()
    assert isinstance(decoder.drafter, SlowDrafter)
    with running(decoder, capacity=2600, places=4) as server:
        yield _Site(server, decoder.drafter)


@pytest.fixture
def site(shared: _Site) -> _Site:
    shared.drafter.seconds = 0.0
    return shared


@pytest.fixture
def page(browser: "Browser", site: _Site) -> "Iterator[Page]":
    with visiting(browser, site.server.root + "/") as found:
        yield found


def _set(page: "Page", **values: str) -> None:
    page.click("#open-settings")
    for name, value in values.items():
        page.fill(f"[name={name}]", value)
    page.click("#settings .primary")


def _ask(page: "Page", question: str = QUESTION, wait: bool = True) -> None:
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")
    if wait:
        _wait(page)


def _wait(page: "Page") -> None:
    page.locator(".answer[aria-busy=true]").wait_for(state="detached")


def _text(page: "Page") -> str:
    return str(page.locator(".answer .body").last.text_content())


def _expected(site: _Site, **body: Any) -> dict[str, Any]:
    """Return the text and the depths that the interface gives for a question."""
    messages = [{"role": "user", "content": QUESTION}]
    options = {"jakiro": {"details": True}, **body}
    request = urllib.request.Request(
        f"{site.server.url}/chat/completions",
        json.dumps({"model": MODEL, "messages": messages, "stream": True, **options}).encode(),
    )
    with urllib.request.urlopen(request) as response:
        events = response.read().decode().split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    tokens = [token for chunk in chunks for token in chunk["jakiro"].get("tokens", [])]
    return {
        "text": "".join(token["text"] for token in tokens),
        "depths": [min(token["depth"], 5) for token in tokens if token["text"]],
    }


def test_a_stream_appears_piece_by_piece_with_the_depths_of_the_interface(
    page: "Page", site: _Site
) -> None:
    _set(page, temperature="0.7", seed="3", max_tokens="60")
    site.drafter.seconds = 0.02
    lengths = set()
    _ask(page, wait=False)
    while page.locator(".answer[aria-busy=true]").count():
        lengths.add(len(_text(page)))
    site.drafter.seconds = 0.0
    expected = _expected(site, temperature=0.7, seed=3, max_tokens=60)
    assert len(lengths) >= 3
    assert _text(page) == expected["text"]
    depths = "all => all.map(own => Number(own.dataset.depth))"
    assert page.locator(".answer .token").evaluate_all(depths) == expected["depths"]
    assert "60 tokens" in page.inner_text(".answer .footer")


def test_the_panel_has_figures_a_legend_and_the_tree(page: "Page") -> None:
    _set(page, max_tokens="40", temperature="0.9", seed="3")
    _ask(page)
    page.locator("#race").wait_for()
    assert float(page.inner_text("#tau")) > 1
    assert float(page.inner_text("#rate")) > 0
    assert "measured on this server with 31 tokens" in page.inner_text("#plain-note")
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


def test_stopping_keeps_the_text_and_frees_the_place(page: "Page", site: _Site) -> None:
    _set(page, max_tokens="2000")
    for how in ("click", "key"):
        site.drafter.seconds = 0.02
        _ask(page, wait=False)
        page.locator(".answer:last-child .token").first.wait_for()
        if how == "click":
            page.click("#send")
        else:
            page.keyboard.press("Escape")
        _wait(page)
        assert "stopped" in page.locator(".answer .footer").last.inner_text()
        site.server.wait_until_idle()
        text = _text(page)
        assert text
        site.drafter.seconds = 0.0
    assert page.locator("#send").inner_text() == "Send"
    _set(page, max_tokens="5")
    _ask(page)
    assert page.locator(".answer").count() == 3
    assert "5 tokens" in page.locator(".answer .footer").last.inner_text()


def test_a_new_chat_forgets_and_a_chat_goes_on(page: "Page", site: _Site) -> None:
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda sent: bodies.append(sent.post_data_json) if sent.method == "POST" else None,
    )
    page.click("#open-settings")
    page.uncheck("[name=compare]")
    page.click("#settings .primary")
    _set(page, max_tokens="6", system="Be short.")
    _ask(page, "one")
    first = _text(page)
    _ask(page, "two")
    roles = [message["role"] for message in bodies[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert bodies[-1]["messages"][2]["content"] == first
    site.drafter.seconds = 0.02
    _set(page, max_tokens="2000")
    _ask(page, "endless", wait=False)
    page.locator(".answer:last-child .token").first.wait_for()
    page.click("#new-chat")
    site.drafter.seconds = 0.0
    assert page.inner_text("#send") == "Send"
    _set(page, max_tokens="6")
    assert page.locator(".message").count() == 0
    assert page.locator("#welcome").is_visible()
    _ask(page, "three")
    assert [message["content"] for message in bodies[-1]["messages"]] == ["Be short.", "three"]


def test_without_drafts_every_token_is_the_target_s(page: "Page", site: _Site) -> None:
    page.click("#open-settings")
    page.uncheck("[name=drafts]")
    page.click("#settings .primary")
    _set(page, max_tokens="40", temperature="0")
    _ask(page)
    assert page.locator(".answer .token:not([data-depth='0'])").count() == 0
    assert _text(page) == _expected(site, temperature=0, max_tokens=40)["text"]
    assert "without drafts" in page.inner_text(".answer .footer")


def test_a_reload_keeps_nothing(page: "Page", site: _Site) -> None:
    site.drafter.seconds = 0.02
    _set(page, key="secret-key", system="Be short.", max_tokens="2000")
    page.check("[name=colors][value=source]", force=True)
    _ask(page, wait=False)
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
    _set(page, max_tokens="100000")
    _ask(page)
    failure = page.locator(".failure")
    assert "longer than a sequence may be" in failure.inner_text()
    assert "lower max_tokens" in failure.inner_text()
    _set(page, max_tokens="5")
    page.click(".failure >> text=Try again")
    page.locator(".failure").wait_for(state="detached")
    _wait(page)
    assert page.locator(".message").count() == 2


def test_a_full_server_says_when_to_try_again(browser: "Browser") -> None:
    decoder = _decoder()
    assert isinstance(decoder.drafter, SlowDrafter)
    decoder.drafter.seconds = 0.05
    with running(decoder, capacity=1000, places=1, queue=0) as server:
        visit = Visit(browser, server.root + "/")
        first, second = visit.open(), visit.open()
        _ask(first, wait=False)
        first.locator(".answer .token").first.wait_for()
        _ask(second)
        assert "Too many requests are waiting" in second.inner_text(".failure")
        assert "asks to wait" in second.inner_text(".failure")
        first.bring_to_front()
        first.click("#send")
        _wait(first)
        decoder.drafter.seconds = 0.0
        server.wait_until_idle()
        second.bring_to_front()
        _set(second, max_tokens="5")
        second.click(".failure >> text=Try again")
        second.locator(".failure").wait_for(state="detached")
        _wait(second)
        assert "5 tokens" in second.inner_text(".answer .footer")
        visit.close()


def test_a_key_is_asked_for_and_used(browser: "Browser") -> None:
    decoder = _decoder()
    with running(decoder, api_keys=(KEY,)) as server, visiting(browser, server.root + "/") as page:
        assert page.inner_text("#state") == "key required"
        _ask(page)
        assert "API key is missing or wrong" in page.inner_text(".failure")
        page.click(".failure >> text=Enter a key")
        assert page.evaluate("() => document.activeElement.name") == "key"
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        page.locator("#server[data-state=ready]").wait_for()
        _set(page, max_tokens="5")
        page.click(".failure >> text=Try again")
        page.locator(".failure").wait_for(state="detached")
        _wait(page)
        assert "5 tokens" in page.inner_text(".answer .footer")


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back(browser: "Browser") -> None:
    decoder = _decoder()
    assert isinstance(decoder.drafter, SlowDrafter)
    decoder.drafter.seconds = 0.05
    with running(decoder, capacity=2600, drain_seconds=0.0) as server:
        port = int(server.root.rpartition(":")[2])
        visit = Visit(browser, server.root + "/")
        page = visit.open()
        _set(page, max_tokens="2000")
        _ask(page, wait=False)
        page.locator(".answer .token").first.wait_for()
    _wait(page)
    assert page.locator(".failure").inner_text() != ""
    assert _text(page) != ""
    page.locator("#server[data-state=unreachable]").wait_for()
    page.click(".failure >> text=Try again")
    page.locator(".failure >> text=cannot be reached").wait_for()
    visit.problems = [own for own in visit.problems if "ERR_" not in own]
    with running(_decoder(), capacity=2600, port=port):
        page.locator("#server[data-state=ready]").wait_for()
        _set(page, max_tokens="5")
        page.click(".failure >> text=Try again")
        page.locator(".failure").wait_for(state="detached")
        _wait(page)
        assert "5 tokens" in page.inner_text(".answer .footer")
        visit.close()


def test_everything_works_by_keyboard(page: "Page") -> None:
    assert page.evaluate("() => document.activeElement.id") == "prompt"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#prompt") == "one\ntwo"
    _set(page, max_tokens="20", temperature="0.9", seed="3")
    page.focus("#prompt")
    page.keyboard.press("Enter")
    _wait(page)
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


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const paints = (...colors) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)].map((own) => own / 255);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((own) => own <= .04045 ? own / 12.92 : ((own + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const root = getComputedStyle(document.documentElement);
  const of = (name) => root.getPropertyValue(name).trim();
  const contrast = (one, other) => {
    const [low, high] = [light(paints(one)), light(paints(other))].sort((a, b) => a - b);
    return (high + .05) / (low + .05);
  };
  const numbered = (name, count) => Array.from({ length: count }, (_, n) => `--${name}${n + 1}`);
  const fills = [...numbered("d", 5), ...numbered("s", 6)];
  const found = fills.map((name) => [name, contrast(of("--ink"), of(name))]);
  for (const ground of ["--paper", "--card", "--sunk"]) {
    for (const text of ["--ink", "--muted"]) {
      found.push([text + ground, contrast(of(text), of(ground))]);
    }
  }
  found.push(["strong", contrast(of("--on-strong"), of("--strong"))]);
  found.push(["danger", contrast(of("--danger"), of("--danger-soft"))]);
  return found.filter(([, value]) => value < 4.5);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_in_both_color_schemes(
    browser: "Browser", site: _Site, scheme: str
) -> None:
    with visiting(browser, site.server.root + "/", color_scheme=scheme) as page:
        red = page.evaluate(
            "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"
        )
        assert (int(red) < 64) == (scheme == "dark")
        assert page.evaluate(CONTRAST) == []


def test_without_colors_tokens_are_underlined(browser: "Browser", site: _Site) -> None:
    with visiting(browser, site.server.root + "/", forced_colors="active") as page:
        _set(page, max_tokens="40", temperature="0.9", seed="3")
        _ask(page)
        line = "own => getComputedStyle(own).textDecorationLine"
        drafted = page.locator(".answer .token[data-depth='1']").first
        assert drafted.evaluate(line) == "underline"
        assert page.locator(".answer .token[data-depth='0']").first.evaluate(line) == "none"


def test_no_width_needs_horizontal_scrolling(page: "Page") -> None:
    _set(page, max_tokens="60")
    _ask(page, "a" * 300)
    for width in (360, 700, 1000, 1800):
        page.set_viewport_size({"width": width, "height": 640})
        assert page.evaluate("() => document.documentElement.scrollWidth") == width
        box = page.locator("#send").bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= width
        toggle = page.locator("#show-insight")
        assert toggle.is_visible() == (width < 960)
        if width < 960:
            toggle.click()
            assert toggle.get_attribute("aria-expanded") == "true"
            assert page.locator("#tree svg").is_visible()
            assert page.evaluate("() => document.documentElement.scrollWidth") == width
            toggle.click()
        assert page.locator("#prompt").is_visible()


def test_whatever_the_model_writes_is_text(browser: "Browser") -> None:
    decoder = _decoder(hostile=True)
    with running(decoder, capacity=2600) as server, visiting(browser, server.root + "/") as page:
        _set(page, temperature="1", seed="1", max_tokens="120")
        _ask(page, "<b>hello</b><script>alert(3)</script>")
        text = _text(page)
        assert all(own in text for own in HOSTILE)
        assert page.locator("img, .answer script, .answer b, .question b").count() == 0
        assert page.inner_text(".question .body").startswith("<b>hello</b>")
        assert page.evaluate("() => document.documentElement.scrollWidth") == 1280
        token = page.locator(".answer .token", has_text="{{7*7}}").first
        token.scroll_into_view_if_needed()
        page.wait_for_timeout(200)  # scrolling hides the description
        token.hover()
        assert "{{7*7}}" in page.locator("#tip").inner_text()


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_long_answer_stays_smooth(browser: "Browser", count: int) -> None:
    decoder = _decoder(lookup=True)
    with running(decoder, capacity=2600) as server, visiting(browser, server.root + "/") as page:
        _set(page, max_tokens=str(count), temperature="0.8", seed="2")
        page.evaluate(LONGEST_FRAME)
        _ask(page, wait=False)
        page.locator(".answer[aria-busy=true]").wait_for(state="detached", timeout=40_000)
        assert f"{count} tokens" in page.inner_text(".answer .footer")
        assert page.locator(".answer .token").count() > count / 2
        rest = "own => own.scrollHeight - own.scrollTop - own.clientHeight"
        assert page.locator("#log").evaluate(rest) < 60
        page.locator(".answer .token", has_text=re.compile(r"\w")).nth(30).click()
        assert page.locator("#tree .node").count() > 0
        assert page.evaluate("() => window.longestFrame") < 1000


LONGEST_FRAME = """() => {
  window.longestFrame = 0;
  let last = performance.now();
  const watch = (now) => {
    window.longestFrame = Math.max(window.longestFrame, now - last);
    last = now;
    requestAnimationFrame(watch);
  };
  requestAnimationFrame(watch);
}"""


@pytest.mark.slow
def test_two_tabs_and_the_way_back(browser: "Browser", site: _Site) -> None:
    visit = Visit(browser, site.server.root + "/")
    first, second = visit.open(), visit.open()
    site.drafter.seconds = 0.01
    for page, seed in ((first, "1"), (second, "2")):
        page.bring_to_front()  # browsers slow down tabs in the background
        _set(page, seed=seed, max_tokens="30", temperature="0.9")
        _ask(page, wait=False)
    for page, seed in ((first, 1), (second, 2)):
        _wait(page)
        site.drafter.seconds = 0.0
        assert _text(page) == _expected(site, seed=seed, max_tokens=30, temperature=0.9)["text"]
    first.bring_to_front()
    site.drafter.seconds = 0.02
    _set(first, max_tokens="2000")
    _ask(first, wait=False)
    first.locator(".answer:last-child .token").first.wait_for()
    first.goto(site.server.root + "/health")
    site.server.wait_until_idle()  # leaving the page has stopped the answer
    site.drafter.seconds = 0.0
    first.go_back()
    first.locator("#server[data-state=ready]").wait_for()
    _set(first, max_tokens="5")
    _ask(first)
    assert "5 tokens" in first.locator(".answer .footer").last.inner_text()
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
