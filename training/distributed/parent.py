"""The end of a process together with its parent, even while the process is stopped."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of Linux


def end_with_parent() -> int:
    """Let the system kill this process as soon as its parent ends, and return the parent's id.

    If the parent ends before the system knows, this process ends at once. Only Linux does this. On
    other systems, the caller compares `os.getppid()` with the result from time to time.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended meanwhile, and there is no signal any more
            os.kill(os.getpid(), signal.SIGKILL)
    return parent
