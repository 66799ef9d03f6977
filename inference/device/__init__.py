"""Decoding on a device that drafts by itself, with the target on a server that verifies."""

from inference.device.decoder import RemoteDecoder

__all__ = ["RemoteDecoder"]
