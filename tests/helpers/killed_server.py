"""`jakiro serve` in a process of its own, which is killed in mid-work and started again."""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any, NamedTuple

import httpx2

from inference.serving.verification_session import VerificationSession
from jakiro.cli import main

FORKING = get_context("forkserver")
FORKING.set_forkserver_preload(
    ["inference.serving.server", "jakiro.cli.decode", "transformers.models.llama", __name__]
)
# Moments of a kill: before and after the target decides about a step, and before it encodes memory.
UNDECIDED, DECIDED, MEMORY = "undecided", "decided", "memory"
_SECONDS = 60.0


class Kill(NamedTuple):
    """A moment at which the server is killed."""

    moment: str
    number: int  # of the step, or of the first token whose memory is asked for


class KilledServer:
    """A server that is started again on the same port whenever it was killed."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self.num_kills = 0
        self.output = folder / "output.txt"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        self._words = ["serve", *words, "--port", str(port)]
        self._plan = folder / "kills.json"
        self._is_closed = Event()
        self.kill_at()
        self._process = self._started()
        self._keeper = Thread(target=self._keep)
        self._keeper.start()

    def kill_at(self, *kills: Kill) -> None:
        """Replace the moments of the next kills."""
        self._plan.write_text(json.dumps(kills))

    @property
    def num_left(self) -> int:
        """The number of kills that have not happened."""
        return len(json.loads(self._plan.read_text()))

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded."""
        end = monotonic() + _SECONDS
        while not self._is_ready():
            assert monotonic() < end, self.output.read_text()
            sleep(0.02)

    def close(self) -> None:
        """End the process, and check that it drained."""
        self._is_closed.set()
        self._process.terminate()
        self._keeper.join(_SECONDS)
        assert self._process.exitcode == 0, self.output.read_text()

    def _is_ready(self) -> bool:
        try:
            return httpx2.get(self.url.replace("/v1", "/health")).status_code == httpx2.codes.OK
        except httpx2.HTTPError:
            return False

    def _started(self) -> BaseProcess:
        process = FORKING.Process(target=_serve, args=(self._words, self._plan, self.output))
        process.start()
        return process

    def _keep(self) -> None:
        """Start the server again whenever it was killed."""
        while True:
            self._process.join()
            if self._process.exitcode != -signal.SIGKILL or self._is_closed.is_set():
                return
            self.num_kills += 1
            self._process = self._started()


@contextmanager
def killed_server(words: Sequence[str], folder: Path) -> Iterator[KilledServer]:
    """Run a server in the block."""
    found = KilledServer(words, folder)
    try:
        found.wait_until_ready()
        yield found
    finally:
        found.close()


def _serve(words: list[str], plan: Path, output: Path) -> None:
    """Run `jakiro serve`, which kills its process at the moments of the plan."""
    with output.open("a") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())

    def reached(moment: str, number: int) -> None:
        kills = json.loads(plan.read_text())
        if [moment, number] in kills:
            kills.remove([moment, number])
            plan.write_text(json.dumps(kills))
            os.kill(os.getpid(), signal.SIGKILL)

    decide, encode = VerificationSession.step, VerificationSession.memory_rows

    def step(self: VerificationSession) -> Any:
        number = self.verdicts.next_step
        reached(UNDECIDED, number)
        decided = decide(self)
        reached(DECIDED, number)
        return decided

    def memory_rows(self: VerificationSession, begin: int, end: int) -> bytes:
        reached(MEMORY, begin)
        return encode(self, begin, end)

    VerificationSession.step = step  # type: ignore[method-assign]
    VerificationSession.memory_rows = memory_rows  # type: ignore[method-assign]
    main(words)
