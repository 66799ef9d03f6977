"""A browser, and a page of the playground, for the tests of this folder."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from helpers.browser import running_browser, visiting
from helpers.playground import Site, site_decoder
from helpers.serving import running
from helpers.slow_drafter import SlowDrafter

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with running_browser() as found:
        yield found


@pytest.fixture(scope="module")
def shared(browser: "Browser") -> Iterator[Site]:
    """A server; it is started after the browser, so that a missing browser takes no time."""
    decoder = site_decoder()
    assert isinstance(decoder.drafter, SlowDrafter)
    with running(decoder, capacity=2600, places=4) as server:
        yield Site(server, decoder.drafter)


@pytest.fixture
def site(shared: Site) -> Site:
    shared.drafter.seconds = 0.0
    return shared


@pytest.fixture
def page(browser: "Browser", site: Site) -> "Iterator[Page]":
    with visiting(browser, site.server.root + "/") as found:
        yield found
