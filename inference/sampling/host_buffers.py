"""Copies between host and device that do not wait for the device's current work."""

import torch
from torch import Tensor


class HostBuffers:
    """Two buffers on the host, which take turns because a copy from or to one may be under way."""

    def __init__(self, like: Tensor, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._device = device
        shape, dtype = like.shape, like.dtype
        self._buffers = [
            torch.empty(shape, dtype=dtype, pin_memory=self._is_pinned) for _ in range(2)
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def upload(self, values: Tensor, destination: Tensor) -> None:
        """Copy values to the device."""
        self._take_turns()
        if (copied := self._copied[0]) is not None:
            copied.synchronize()  # the last copy from this buffer, two uploads ago
        self._buffers[0].copy_(values)
        destination.copy_(self._buffers[0], non_blocking=True)
        self._copied[0] = self._event()

    def download(self, source: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start to copy a tensor to the host.

        Returns:
            The copy, which is overwritten by the next call but one; and the event after which it is
            complete, or None if it is complete already.
        """
        self._take_turns()
        self._buffers[0].copy_(source, non_blocking=True)
        self._copied[0] = self._event()
        return self._buffers[0], self._copied[0]

    def _take_turns(self) -> None:
        self._buffers.reverse()
        self._copied.reverse()

    def _event(self) -> torch.cuda.Event | None:
        if not self._is_pinned:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
