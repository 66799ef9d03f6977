"""A real browser, and pages that must stay within their server's origin."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Without these switches, the browser asks its maker for updates.
_SWITCHES = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_REFUSED = "Failed to load resource"  # a remark of the browser on a response like 401


def browser_path() -> str:
    """Return the path of a Chromium; skip the test if there is none."""
    found = os.environ.get("JAKIRO_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if find_spec("playwright") is None:
        pytest.skip("playwright is not installed; remedy: pip install 'jakiro[dev]'")
    if found is None:
        pytest.skip("no Chromium was found; remedy: install it, or set JAKIRO_CHROMIUM to its path")
    return found


@contextmanager
def running_browser() -> "Iterator[Browser]":
    """Run a browser in the block; skip the test if there is none."""
    path = browser_path()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_SWITCHES)
        yield browser
        browser.close()


class Visit:
    """A visit to a page, during which problems and foreign requests are collected."""

    def __init__(self, browser: "Browser", root: str, **options: Any) -> None:
        self.problems: list[str] = []
        self.root = root
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 800}, **options}
        )
        self.context.set_default_timeout(10_000)

    def open(self) -> "Page":
        """Return a new tab with the page, as soon as it knows the server's state."""
        page = self.context.new_page()
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        page.on("request", self._on_request)
        page.goto(self.root)
        page.locator("#server:not([data-state=connecting])").wait_for()
        return page

    def close(self) -> None:
        """End the visit, and check that there were no problems."""
        self.context.close()
        assert self.problems == []

    def _on_console(self, message: "ConsoleMessage") -> None:
        if message.type in {"error", "warning"} and _REFUSED not in message.text:
            self.problems.append(message.text)

    def _on_request(self, request: "Request") -> None:
        if not request.url.startswith(self.root):
            self.problems.append(f"foreign request: {request.url}")


@contextmanager
def visiting(browser: "Browser", root: str, **options: Any) -> "Iterator[Page]":
    """Open the page in the block, and check that nothing went wrong."""
    visit = Visit(browser, root, **options)
    try:
        yield visit.open()
    except BaseException:
        visit.context.close()
        raise
    visit.close()
