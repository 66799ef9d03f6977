"""A server of the playground for tests, and what a user does on its page."""

import json
import urllib.request
from typing import TYPE_CHECKING, Any, NamedTuple

from helpers.models import tiny_drafter, tiny_llama
from helpers.serving import MODEL, Running
from helpers.slow_drafter import SlowDrafter
from helpers.templates import CHATML
from helpers.tokenizers import tiny_tokenizer

from inference import SpeculativeDecoder
from inference.drafters.trained.drafter import TrainedDrafter
from jakiro.target.adapter import TargetAdapter

if TYPE_CHECKING:
    from playwright.sync_api import Page


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


class Site(NamedTuple):
    """A server of the playground, and its drafter, whose speed can be changed."""

    server: Running
    drafter: SlowDrafter


def site_decoder(hostile: bool = False) -> SpeculativeDecoder:
    """Return a decoder with a slow drafter."""
    tokenizer = tiny_tokenizer(CHATML)
    if hostile:
        tokenizer.add_tokens([f"{text}{copy}" for text in HOSTILE for copy in range(COPIES)])
    model = tiny_llama(vocab=len(tokenizer), max_position_embeddings=4096)
    if hostile:  # every token has the same probability
        model.model.norm.weight.data.zero_()
    target = TargetAdapter(model)
    trained = TrainedDrafter.for_target(tiny_drafter(target), target)
    return SpeculativeDecoder(model, SlowDrafter(trained), tokenizer, tree="fixed")


def set_options(page: "Page", **values: str) -> None:
    """Change settings of the page."""
    page.click("#open-settings")
    for name, value in values.items():
        page.fill(f"[name={name}]", value)
    page.click("#settings .primary")


def ask(page: "Page", question: str = QUESTION, wait: bool = True) -> None:
    """Send a question, and wait for the end of the answer unless `wait` is false."""
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")
    if wait:
        wait_for_answer(page)


def wait_for_answer(page: "Page") -> None:
    """Wait until no answer is being written."""
    page.locator(".answer[aria-busy=true]").wait_for(state="detached")


def text_of_answer(page: "Page") -> str:
    """Return the text of the last answer."""
    return str(page.locator(".answer .body").last.text_content())


def expected_answer(site: Site, **body: Any) -> dict[str, Any]:
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
