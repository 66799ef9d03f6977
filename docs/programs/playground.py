"""Program that takes the picture of the playground in the guide to `jakiro serve`.

It needs a Chromium (`apt-get install chromium`), playwright, and the model smollm2-135m-instruct:

    jakiro fetch smollm2-135m-instruct
    python docs/programs/playground.py

Figures in the picture are those of the machine on which the program runs.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import ViewportSize, sync_playwright

PICTURE = Path(__file__).parents[1] / "figures" / "playground.png"
MODEL = "smollm2-135m-instruct"
QUESTION = "Write a Python function that checks whether a word is a palindrome."
WIDTH, HEIGHT = 1280, 760
NUM_COLORS = 128  # few, to keep the file small
SWITCHES = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")


@contextmanager
def serving(model: str) -> Iterator[str]:
    """Serve a model in the block, and return the address of its playground."""
    command = [sys.executable, "-m", "jakiro", "serve", "--port", "0", "--places", "1"]
    command += ["--drafter", model, "--tree", "fixed"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = (re.search(r"playground: (\S+)", line) for line in process.stderr)
        try:
            address = next((match[1] for match in found if match), None)
            if address is None:
                sys.exit(f"error: {' '.join(command)} has not started a server")
            yield address
        finally:
            process.terminate()


def picture_of(address: str, scheme: Literal["light", "dark"]) -> Image.Image:
    """Return a picture of the playground after an answer, with the tree of a token.

    Args:
        address: address of the playground.
        scheme: color scheme, light or dark.
    """
    path = os.environ.get("JAKIRO_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=SWITCHES)
        size = ViewportSize(width=WIDTH, height=HEIGHT)
        page = browser.new_page(viewport=size, color_scheme=scheme)
        page.goto(address)
        page.fill("#prompt", QUESTION)
        page.press("#prompt", "Enter")
        page.locator("#race").wait_for(timeout=120_000)
        depth = max(
            int(token.get_attribute("data-depth") or 0)
            for token in page.locator(".answer .token").all()
        )
        page.locator(f".answer .token[data-depth='{depth}']").first.click()
        page.mouse.move(WIDTH / 2, HEIGHT - 4)
        page.wait_for_timeout(500)
        image = Image.open(BytesIO(page.screenshot()))
        browser.close()
    return image.convert("RGB")


def main() -> None:
    """Take the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURE)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    arguments = parser.parse_args()
    with serving(MODEL) as address:
        image = picture_of(address, arguments.scheme)
    image.quantize(NUM_COLORS, dither=Image.Dither.NONE).save(arguments.out, optimize=True)


if __name__ == "__main__":
    main()
