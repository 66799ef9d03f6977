"""The memory that a device's trained drafter reads; a server with the same encoders sends it."""

from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.memory import encoder_fingerprint, memory_drafter
from inference.protocol import Drafter
from inference.remote.messages import (
    MemoryRequest,
    RowEncoding,
    VerifierInfo,
)
from jakiro.errors import ConfigError, TargetMismatch


def memory_request(
    drafter: Drafter | None, info: VerifierInfo, encoding: RowEncoding
) -> MemoryRequest | None:
    """Return the memory to ask for; None if the drafter reads tokens alone."""
    if not isinstance(drafter, TrainedDrafter):
        if encoding != "exact":
            raise ConfigError(
                f"memory is encoded as {encoding} only for a trained drafter",
                expected="a folder of jakiro export --to device, or a TrainedDrafter",
                got="no drafter" if drafter is None else repr(drafter),
                remedy="choose such a drafter, or leave out the encoding of memory",
            )
        return None
    if memory_drafter(drafter) is None:
        raise ConfigError(
            "this drafter computes with the target's last layers, which stay on the server",
            expected="a drafter without tail_layers",
            got=f"tail_layers: {drafter.model.config.settings.tail_layers}",
            remedy="let the server draft with jakiro serve --drafter, or train another drafter",
        )
    if info.memory is None:
        raise ConfigError(
            f"the server of {info.model} encodes no memory for a trained drafter",
            expected="a server with the same drafter",
            got="a server without a trained drafter",
            remedy="start it with jakiro serve --drafter DRAFTER --remote-sessions 8",
        )
    encoder = encoder_fingerprint(drafter.model)
    if encoder != info.memory.encoder:
        raise TargetMismatch(
            f"the server of {info.model} has another drafter than this machine",
            expected=f"a drafter with the encoders {info.memory.encoder}",
            got=encoder,
            remedy="use the drafter that the server was started with",
        )
    return MemoryRequest(encoder=encoder, encoding=encoding)
