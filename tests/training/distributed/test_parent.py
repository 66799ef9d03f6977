"""A process ends with its parent."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

SECONDS = 20.0
CHILD = """
import os, signal
from training.distributed.parent import end_with_parent
assert end_with_parent() == os.getppid()
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


ORPHAN = """
import os
from training.distributed.parent import end_with_parent
ids = iter([2, 1])
os.getppid = lambda: next(ids)
end_with_parent()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the signal")
def test_a_process_ends_if_its_parent_ended_before_the_system_knew() -> None:
    assert subprocess.run([sys.executable, "-c", ORPHAN], check=False).returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the signal")
def test_a_stopped_process_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(SECONDS)
    parent.stdout.close()
    end = time.monotonic() + SECONDS
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)
