"""`jakiro verify --url`: the verification of a running server."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jakiro.cli.options import Context, refuse_others, settings_from
from jakiro.cli.remote_server import server_key
from jakiro.errors import ConfigError
from jakiro.utils.progress import ProgressDisplay, tracked

if TYPE_CHECKING:
    from inference.generation.prompts import Prompt
    from inference.losslessness.server import ServerCheck, ServerReport

_OTHERS = {"url", "target", "prompts", "quick", "dtype", "device", "json_file"}


def verify_running_server(
    context: Context,
    prompts: "Sequence[Prompt]",
    samples: int | None,
    show_check: "Callable[[ServerCheck], None]",
) -> "ServerReport":
    """Verify a server as the options of the running command describe.

    Args:
        context: context of `jakiro verify`.
        prompts: prompts to send.
        samples: number of samples; None for the default.
        show_check: function that is called after each check.

    Raises:
        ConfigError: the target is missing among the options, or an option has no effect.
    """
    from inference.losslessness.server import ServerVerifySettings
    from jakiro.utils.pretrained import choose_device, load_causal_lm, load_tokenizer

    fields = ServerVerifySettings.model_fields.keys() - {"other_weights"}
    refuse_others(context, {*fields, *_OTHERS}, "--url verifies a server")
    chosen: dict[str, Any] = context.params
    if chosen["target"] is None:
        raise ConfigError(
            "the server's target must be computed here, too",
            expected="--url and --target",
            got="--url",
            remedy="name the model that the server serves with --target",
        )
    settings = settings_from(context, ServerVerifySettings, samples=samples)

    from inference.client.client import ServerClient
    from inference.losslessness.server import verify_server

    client = ServerClient(chosen["url"], server_key())
    try:
        client.connect(settings.model)
        device = choose_device(chosen["device"])
        model = load_causal_lm(chosen["target"], dtype=chosen["dtype"], device=device)
        tokenizer = load_tokenizer(chosen["target"], "the tokenizer of the target")
        with ProgressDisplay() as progress:
            return verify_server(
                client, model, tokenizer, prompts, settings, show_check, tracked(progress)
            )
    finally:
        client.close()
