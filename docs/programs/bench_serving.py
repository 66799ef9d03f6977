"""Program that puts a load on a server of its own, whose clients draft: `make bench-serving`.

The load is that of `jakiro bench --url`, with one text for each client. Each text is compared with
the one that the server writes without other requests. A share of the replies is lost on the way.
The server can be killed in the middle of its work, and is then started again on the same port:

    make bench-serving ARGS="--target TARGET --prompts PROMPTS.jsonl --clients 100 --lost-share 0.2
                             --kills 2 --json RESULT.json"
"""

import argparse
import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import httpx2
from rich.console import Console

from inference.benchmark.server.devices import decided_steps
from inference.benchmark.server.document import LoadDocument, LoadSettings
from inference.benchmark.server.figures import load_table
from inference.benchmark.server.run import measure_load
from jakiro.errors import JakiroError, ResourceError
from jakiro.utils.files import write_atomically

_SECONDS_TO_START = 300.0
_PAUSE = 0.02  # seconds


class ServerProcess:
    """`jakiro serve` in a process of its own, on a port that stays the same.

    Args:
        words: arguments of the command, without the port.
        log: file for its messages.
    """

    def __init__(self, words: Sequence[str], log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.root = f"http://127.0.0.1:{port}"
        self.url = f"{self.root}/v1"
        self.num_kills = 0
        self.log = log
        self._command = [sys.executable, "-m", "jakiro", "serve", *words, "--port", str(port)]
        self._is_over = Event()
        self._process = self._started()

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            ResourceError: the process has ended, or takes too long.
        """
        end = time.monotonic() + _SECONDS_TO_START
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end:
                raise ResourceError("the server does not start", got=self.log.read_text()[-2000:])
            time.sleep(_PAUSE)

    def kill_after(self, num_steps: int, times: int) -> None:
        """Kill and restart the process whenever it has decided some steps.

        Args:
            num_steps: number of decided steps of each process that is killed.
            times: number of kills.
        """
        while self.num_kills < times and not self._is_over.is_set():
            decided = asyncio.run(decided_steps(self.url, None))
            if decided is None or decided.decided < num_steps:
                time.sleep(_PAUSE)
                continue
            self._process.kill()
            self._process.wait()
            self.num_kills += 1
            self._process = self._started()

    def close(self) -> None:
        """End the process."""
        self._is_over.set()
        self._process.terminate()
        self._process.wait()

    def _is_ready(self) -> bool:
        try:
            return httpx2.get(f"{self.root}/health").status_code == httpx2.codes.OK
        except httpx2.HTTPError:
            return False

    def _started(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as file:
            return subprocess.Popen(self._command, stdout=file, stderr=file)


@contextmanager
def server_process(arguments: argparse.Namespace, log: Path) -> Iterator[ServerProcess]:
    """Run a server in the block, which is killed as often as the arguments say.

    Args:
        arguments: arguments of the program.
        log: file for the server's messages.
    """
    server = ServerProcess(server_words(arguments), log)
    kills = Thread(target=server.kill_after, args=(arguments.kill_after, arguments.kills))
    try:
        server.wait_until_ready()
        kills.start()
        yield server
    finally:
        server.close()
        if kills.ident is not None:
            kills.join()


def server_words(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments of `jakiro serve`: a fixed tree, so that drafts depend on tokens only.

    Args:
        arguments: arguments of the program.
    """
    options = {
        "target": arguments.target,
        "drafter": arguments.drafter,
        "tree": "fixed",
        "dtype": "float32",
        "places": arguments.places,
        "queue": 2 * arguments.clients,
        "capacity": arguments.capacity,
        "remote-sessions": arguments.clients,
        "remote-sessions-per-key": arguments.clients,
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def load_settings(arguments: argparse.Namespace, url: str) -> LoadSettings:
    """Return the settings of the load: one greedy and one sampled text for each prompt.

    Args:
        arguments: arguments of the program.
        url: address of the server.
    """
    return LoadSettings(
        url=url,
        prompts=arguments.prompts,
        num_prompts=-(-arguments.clients // 2),
        max_new_tokens=arguments.tokens,
        temperatures=(0.0, 1.0),
        concurrency=arguments.clients,
        requests=arguments.clients,
        device_drafter=arguments.drafter,
        lost_share=arguments.lost_share,
        check=True,
    )


def failures(document: LoadDocument, server: ServerProcess, kills: int) -> Iterator[str]:
    """Yield what does not hold.

    Args:
        document: what was measured.
        server: the server.
        kills: number of kills that were asked for.
    """
    device, decided = document.figures.device, document.decided
    if not document.passed:
        yield "a text was lost, differs, or has a step that was decided twice"
    if server.num_kills != kills:
        yield f"the server was killed {server.num_kills} times instead of {kills}: fewer steps"
    if kills and (device is None or not device.resumes):
        yield "no text was continued in another session"
    if not kills and (decided is None or device is None or decided.decided != device.steps):
        yield "the server has not decided each step exactly once"
    if document.settings.lost_share and not kills and not (decided and decided.replayed):
        yield "no verdict was sent again"
    if "Traceback" in server.log.read_text():
        yield "the log of the server has a traceback"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _track(name: str, total: int | None) -> Callable[[], None]:
    _say(f"{name}: {total} texts")
    return lambda: None


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code: 1 if anything was lost or differs.

    Args:
        words: arguments of the program; None for those of the command line.
    """
    arguments = _parsed(words)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the server too
    with TemporaryDirectory() as folder:
        try:
            with server_process(arguments, Path(folder) / "server.log") as server:
                settings = load_settings(arguments, server.url)
                document = asyncio.run(measure_load(settings, track=_track))
        except JakiroError as error:
            _say(f"error: {error}")
            return 2
        for part in load_table(document):
            Console().print(part, highlight=False, markup=False)
        _say(f"the server was killed {server.num_kills} times")
        found = list(failures(document, server, arguments.kills))
    if arguments.json is not None:
        write_atomically(arguments.json, document.model_dump_json(indent=1) + "\n")
    for failure in found:
        _say(f"failure: {failure}")
    return 1 if found else 0


def _parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--prompts", required=True, help="file with prompts")
    parser.add_argument("--drafter", default="lookup", help="drafter of server and clients")
    parser.add_argument("--clients", type=int, default=100, help="number of clients and of texts")
    parser.add_argument("--tokens", type=int, default=64, help="number of new tokens of a text")
    parser.add_argument("--lost-share", type=float, default=0.0, help="share of lost replies")
    parser.add_argument("--kills", type=int, default=0, help="number of kills of the server")
    parser.add_argument(
        "--kill-after", type=int, default=300, help="number of steps that a killed server decides"
    )
    parser.add_argument("--places", type=int, default=8, help="places of the server")
    parser.add_argument("--capacity", type=int, default=1024, help="longest sequence in tokens")
    parser.add_argument("--json", type=Path, help="file for the measured values")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
