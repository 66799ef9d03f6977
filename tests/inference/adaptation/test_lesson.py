"""Lessons and results are read without trust; the process stops at once, and with its server."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import false_learner

from inference.adaptation.lesson import LearningProcess, Lesson, Passage, read_lesson, read_result
from jakiro.errors import DataError

LEARNER = str(Path(false_learner.__file__))
SECONDS = 20.0


def lesson_in(folder: Path, num_texts: int = 20_000) -> Lesson:
    passage = Passage(token_ids=(1, 2, 3), prompt_length=1)
    return Lesson(
        folder=folder,
        number=1,
        parent=0,
        drafter="drafter",
        target=None,
        identity="x",
        dtype="float32",
        device="cpu",
        tenants=("a",),
        learned=(passage,) * num_texts,  # by default, more than a pipe can hold
        held_out=(passage,),
    )


def _beats(folder: Path) -> int:
    path = folder / "alive"
    return path.stat().st_size if path.exists() else 0


async def _until_beats(folder: Path, count: int) -> None:
    end = time.monotonic() + SECONDS
    while _beats(folder) < count:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def _start(folder: Path, mode: str) -> LearningProcess:
    (folder / "weights.safetensors").write_bytes(b"")
    command = (sys.executable, LEARNER, mode, str(folder))
    return await LearningProcess.start(command, lesson_in(folder))


def test_a_paused_process_does_nothing_until_it_is_resumed(tmp_path: Path) -> None:
    async def run() -> None:
        process = await _start(tmp_path, "slow")
        await _until_beats(tmp_path, 3)
        process.pause()
        process.pause()
        await asyncio.sleep(0.1)  # a beat may be under way
        count, age = _beats(tmp_path), process.age
        await asyncio.sleep(0.3)
        assert _beats(tmp_path) == count
        assert process.age > age + 0.2
        process.resume()
        await _until_beats(tmp_path, count + 3)
        process.pause()
        await process.kill()  # a stopped process ends, too
        assert process.is_done
        assert process.result().outcome == "failed"

    asyncio.run(run())


@pytest.mark.parametrize(("mode", "outcome"), [("nothing", "not_better"), ("crash", "failed")])
def test_the_result_of_a_process_is_read(tmp_path: Path, mode: str, outcome: str) -> None:
    async def run() -> None:
        process = await _start(tmp_path, mode)
        while not process.is_done:
            await asyncio.sleep(0.01)
        assert process.result().outcome == outcome

    asyncio.run(run())


_SERVER = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {root!r}]
from tests.inference.adaptation.test_lesson import LearningProcess, lesson_in

async def run():
    folder = Path({folder!r})
    command = (sys.executable, {learner!r}, "slow", str(folder))
    process = await LearningProcess.start(command, lesson_in(folder))
    while not (folder / "alive").exists():
        await asyncio.sleep(0.01)
    process.pause()
    print(process._process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(run())
"""


@pytest.mark.slow  # starts two processes
def test_a_stopped_process_ends_when_the_server_is_killed(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    (tmp_path / "weights.safetensors").write_bytes(b"")
    source = _SERVER.format(
        tests=str(root / "tests"), root=str(root), folder=str(tmp_path), learner=LEARNER
    )
    server = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    child = int(server.stdout.readline())
    assert psutil.pid_exists(child)
    os.kill(server.pid, signal.SIGKILL)
    server.wait(SECONDS)
    server.stdout.close()
    end = time.monotonic() + SECONDS
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_lesson_survives_the_pipe() -> None:
    lesson = lesson_in(Path("versions"), 1)
    assert read_lesson(lesson.model_dump_json().encode()) == lesson


@pytest.mark.parametrize("cut", [0, -1])
def test_a_lesson_that_was_cut_off_is_refused_without_its_tokens(cut: int) -> None:
    data = lesson_in(Path("versions"), 1).model_dump_json().encode()
    with pytest.raises(DataError, match="1 wrong fields") as info:
        read_lesson(data[:cut])
    assert "1,2,3" not in str(info.value)


@pytest.mark.parametrize("output", [b"", b'{"outcome": "bett'])
def test_an_output_without_a_result_is_a_failure(output: bytes) -> None:
    assert read_result(output).outcome == "failed"
