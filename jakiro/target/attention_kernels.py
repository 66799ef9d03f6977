"""Attention without cuDNN, whose kernels are planned again for each number of queries and keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch


class _CudnnSwitch:
    """Switches cuDNN attention off as long as any thread of the process needs this."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_users = 0
        self._was_enabled = True

    def acquire(self) -> None:
        with self._lock:
            if self._num_users == 0:
                self._was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._num_users += 1

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                torch.backends.cuda.enable_cudnn_sdp(self._was_enabled)


_SWITCH = _CudnnSwitch()


@contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
    """Compute attention without cuDNN, which takes tens of milliseconds to plan for a new shape.

    The number of keys changes all the time while texts grow. The setting belongs to the process, so
    it is restored when no thread is inside such a block any more.
    """
    if device.type != "cuda":
        yield
        return
    _SWITCH.acquire()
    try:
        yield
    finally:
        _SWITCH.release()
