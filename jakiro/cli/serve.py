"""The command `jakiro serve`."""

import sys

import typer

from inference.serving.settings import ServeSettings
from jakiro.cli import options
from jakiro.cli.decoding import DecoderSettings
from jakiro.cli.output import say
from jakiro.utils.extras import require_extra
from jakiro.utils.logs import quiet_libraries


@options.with_options
@quiet_libraries()
def serve(
    *,
    drafter: options.DrafterOption,
    target: options.TargetOfDrafter = None,
    settings: ServeSettings,
    decoder: DecoderSettings,
) -> None:
    """Serve a target with OpenAI's interface, sped up by a drafter.

    Each request must contain a key if there is a file of keys, or if the environment variable
    JAKIRO_API_KEY is set; it has several keys if they are separated by commas.
    """
    from inference.serving.learning.adaptation import Learner
    from inference.serving.server import serve as serve_decoder

    learner = None
    if settings.adapt != "off":
        require_extra("train")  # of the process that learns
        command = (sys.executable, "-m", "training.online")
        name = drafter.removeprefix("drafter=")
        learner = Learner(command, name, target, decoder.other_weights)

    def on_ready(url: str) -> None:
        say(f"ready: {url}")
        if settings.playground:
            say(f"playground: {url.removesuffix('v1')}")

    code = serve_decoder(lambda: decoder.load(drafter, target), settings, on_ready, learner)
    raise typer.Exit(code)
