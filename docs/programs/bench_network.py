"""Program that measures texts over simulated networks: `make bench-network`.

Ways to get a text: a stream of the server without and with drafts of its own, and drafts of this
machine that the server verifies, each with the drafters that are given. Every text is compared with
that of the same decoder without a network. Seconds depend on what else the machine does; bytes and
requests do not.

A run can be interrupted at any time, and goes on where it has stopped, unless the target, a drafter
or a prompt has changed:

    make bench-network ARGS="--target T --trained moa=FOLDER --trained feedback=FOLDER --lm MODEL
                             --prompts PROMPTS.jsonl --minutes 3 --json RESULT.json"
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import httpx2
import torch

from inference.benchmark.machine import environment_of
from inference.benchmark.network import PROFILES, simulated_network
from inference.benchmark.stored_parts import PARTS, continued_document, parts_of
from inference.decoder import SpeculativeDecoder
from inference.device import RemoteDecoder
from inference.drafters.delegating import DelegatingDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.memory import encoder_fingerprint, row_dtype, row_format
from inference.generation.prompt_file import read_prompts
from inference.generation.prompts import encode_prompt
from inference.outputs import GenerateOutput
from inference.protocol import Drafter, DraftSession
from inference.remote.messages import RowEncoding
from inference.sampling.options import Sampling
from inference.serving.server import Server
from inference.serving.settings import ServeSettings
from jakiro.drafter import JakiroDrafter
from jakiro.errors import JakiroError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.files import write_atomically
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer
from jakiro.utils.processor import processor

STREAM, SERVER, DEVICE = "stream", "server drafts", "device drafts"
MODEL = "target"
MOST_ATTEMPTS = 12  # of a stream, which begins again after its connection was lost
SEED = 7
KEY = ("method", "profile", "temperature", "prompt")  # of a text


class Method(NamedTuple):
    """A way to get a text."""

    kind: str
    drafter: str | None  # name of the drafter
    memory: str | None = None  # encoding of the rows of a trained drafter

    def __str__(self) -> str:
        """Return the name of the row."""
        return ", ".join(part for part in self if part is not None)


class QuantizedDrafts(DelegatingDrafter):
    """A drafter that samples from integer weights, as on a device."""

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> DraftSession:
        """Return a session of the wrapped drafter.

        Args:
            sampling: options by which tokens are selected.
            capacity: largest number of tokens of a sequence.
            batch: number of sequences.
        """
        return self.drafter.new_session(replace(sampling, quantizes_drafts=True), capacity, batch)


class Bench:
    """The target, the drafters, and what was measured so far.

    Args:
        arguments: arguments of the program.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.model = load_causal_lm(arguments.target, dtype=torch.float32).requires_grad_(False)
        self.target = TargetAdapter(self.model)
        self.tokenizer = load_tokenizer(arguments.target)
        self.drafters: dict[str, Drafter] = {"lookup": LookupDrafter()}
        for name, path in (own.split("=", 1) for own in arguments.trained):
            drafter = JakiroDrafter.from_pretrained(path).float()
            self.drafters[name] = TrainedDrafter.for_target(drafter, self.target, self.tokenizer)
        self.trained = [own.split("=", 1)[0] for own in arguments.trained]
        if arguments.lm is not None:
            small = load_causal_lm(arguments.lm, dtype=torch.float32)
            self.drafters["small LM"] = SmallLMDrafter(small, self.model)
        prompts = read_prompts(arguments.prompts)[: arguments.num_prompts]
        size = self.target.spec.vocab_size
        self.prompts = [encode_prompt(own.first, self.tokenizer, size) for own in prompts]
        settings = {"new tokens": arguments.tokens, "capacity": arguments.capacity, "seed": SEED}
        settings |= {"processor": processor(), "torch": torch.__version__}
        parts = parts_of(self.target, self.drafters, self.prompts, **settings)
        document = continued_document(arguments.json, parts, rows=[])
        self.rows: list[dict[str, Any]] = document["rows"]
        self.parts: dict[str, str] = document[PARTS]
        self._described = {name: _described(own) for name, own in self.drafters.items()}
        environment = environment_of(self.target, arguments.target)
        self._environment = environment.model_dump(mode="json")
        self._expected: dict[Any, GenerateOutput] = {}

    @property
    def methods(self) -> list[Method]:
        """All ways to get a text."""
        found = [Method(STREAM, None), *(Method(SERVER, name) for name in self.trained)]
        for name in self.drafters:
            several = ("exact", "int8") if name in self.trained else (None,)
            found += [Method(DEVICE, name, memory) for memory in several]
        return found

    def run(self, seconds: float) -> bool:
        """Measure until the time is over, and return whether all was measured."""
        end = time.monotonic() + seconds
        known = {tuple(row[name] for name in KEY) for row in self.rows}
        hosts: Sequence[str | None] = self.trained or [None]
        for host in hosts:
            with self._server(host) as server:
                for method in (own for own in self.methods if self._host(own) == host):
                    for key in self._cells(method):
                        if key in known:
                            continue
                        if time.monotonic() >= end:
                            return False
                        self._measure(server, method, key)
        return True

    def _host(self, method: Method) -> str | None:
        """Return the drafter of the server that a method needs."""
        if method.drafter in self.trained:
            return method.drafter
        return self.trained[0] if self.trained else None

    def _cells(self, method: Method) -> Iterator[tuple[str, str, float, int]]:
        for profile in self.arguments.profiles:
            for temperature in self.arguments.temperatures:
                if not (method.memory == "int8" and temperature > 0):
                    for prompt in range(len(self.prompts)):
                        yield str(method), profile, temperature, prompt

    def _measure(self, server: Server, method: Method, key: tuple[str, str, float, int]) -> None:
        """Get one text, and keep what it took."""
        _, profile, temperature, prompt = key
        with simulated_network(server.url, PROFILES[profile], seed=prompt) as network:
            write = self._drafted if method.kind == DEVICE else self._streamed
            found = write(network.url, method, temperature, self.prompts[prompt])
        traffic = network.traffic
        text = found.pop("text")
        row: dict[str, Any] = dict(zip(KEY, key, strict=True))
        expected = self._text(method, temperature, prompt)
        row |= {
            **found,
            "tokens": len(expected.new_token_ids),
            "is_complete": text is not None,
            "is_exact": text in (expected.new_token_ids, expected.text),
            "up": traffic.up,
            "down": traffic.down,
            "lost": traffic.num_lost,
            "cut": traffic.num_cut,
        }
        self.rows.append(row)
        self.save()

    def _text(self, method: Method, temperature: float, prompt: int) -> GenerateOutput:
        """Return the output of the decoder of a method without a network."""
        drafter = None if method.drafter is None else self.drafters[method.drafter]
        if temperature == 0:
            drafter = None
        elif drafter is not None and method.kind == DEVICE:
            drafter = QuantizedDrafts(drafter)
        key = (repr(drafter), method.drafter if drafter else None, temperature, prompt)
        if key not in self._expected:
            decoder = SpeculativeDecoder(self.model, drafter, self.tokenizer, tree="fixed")
            self._expected[key] = decoder.generate(
                self.prompts[prompt], **self._options(temperature)
            )
        return self._expected[key]

    def _options(self, temperature: float) -> dict[str, Any]:
        own: dict[str, Any] = {"temperature": temperature, "max_new_tokens": self.arguments.tokens}
        return own | ({"seed": SEED, "top_k": 50} if temperature > 0 else {})

    def _drafted(
        self, url: str, method: Method, temperature: float, prompt: Sequence[int]
    ) -> dict[str, Any]:
        """Write a text whose drafts are made here."""
        assert method.drafter is not None
        drafter = self.drafters[method.drafter]
        memory: RowEncoding = "int8" if method.memory == "int8" else "exact"
        with RemoteDecoder(url, drafter, memory=memory, patience=120.0) as remote:
            times = [time.monotonic()]
            output = remote.generate(
                list(prompt),
                on_text=lambda _: times.append(time.monotonic()),
                **self._options(temperature),
            )
            times.append(time.monotonic())
        return {
            "text": output.new_token_ids,
            "seconds": times[-1] - times[0],
            "first": times[1] - times[0],
            "calls": output.traffic.num_calls,
            "repeats": output.traffic.num_repeats,
            "resumes": output.traffic.num_resumes,
            "forwards": output.stats.target_forwards,
            "prompt_memory": len(prompt) * _row_bytes(drafter, memory),
        }

    def _streamed(
        self, url: str, method: Method, temperature: float, prompt: Sequence[int]
    ) -> dict[str, Any]:
        """Write a text that the server streams, which begins again if its connection is lost.

        Over a link that always breaks before the end of the text, the text is None.
        """
        options = self._options(temperature)
        own: dict[str, Any] = {"drafting": method.kind == SERVER}
        if "top_k" in options:
            own["top_k"] = options["top_k"]
        body = {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": options["max_new_tokens"],
            "temperature": temperature,
            "seed": SEED,
            "stream": True,
            "jakiro": own,
        }
        started = time.monotonic()
        for attempt in range(MOST_ATTEMPTS):
            try:
                text, first = _read_stream(url, body)
            except httpx2.HTTPError:
                time.sleep(0.2)
                continue
            times = {"seconds": time.monotonic() - started, "first": first - started}
            return _stream_row(text, attempt + 1, times)
        return _stream_row(None, MOST_ATTEMPTS, {"seconds": None, "first": None})

    @contextmanager
    def _server(self, name: str | None) -> Iterator[Server]:
        """Serve the target with a drafter in the block, in a thread of its own."""
        drafter = None if name is None else self.drafters[name]
        decoder = SpeculativeDecoder(self.model, drafter, self.tokenizer, tree="fixed")
        settings = ServeSettings(
            port=0, model_name=MODEL, capacity=self.arguments.capacity, remote_sessions=8
        )
        server = Server(lambda: decoder, settings)
        ready = Event()
        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(asyncio.run, server.run_until_drained(lambda _: ready.set()))
            serving.add_done_callback(lambda _: ready.set())  # also if the server does not start
            try:
                ready.wait()
                if serving.done():
                    raise JakiroError("the server has ended", got=f"exit code {serving.result()}")
                yield server
            finally:
                server.drain()

    def save(self) -> None:
        """Write the rows and figures so far."""
        document = {
            "environment": self._environment,
            PARTS: self.parts,
            "drafters": self._described,
            "profiles": {name: own._asdict() for name, own in PROFILES.items()},
            "new_tokens": self.arguments.tokens,
            "prompt_tokens": [len(own) for own in self.prompts],
            "figures": figures(self.rows),
            "rows": self.rows,
        }
        write_atomically(self.arguments.json, json.dumps(document, indent=1) + "\n")


def figures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of each method, profile and temperature, in the order of the rows.

    Args:
        rows: what was measured for each text.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["profile"], row["temperature"]), []).append(row)
    found = []
    for (method, profile, temperature), several in groups.items():
        own = [row for row in several if row["is_complete"]]
        found.append(
            {
                "method": method,
                "profile": profile,
                "temperature": temperature,
                "texts": len(several),
                "complete": len(own),
                "exact": sum(row["is_exact"] for row in own),
                "repeats": sum(row["repeats"] for row in several),
                "resumes": sum(row["resumes"] for row in several),
                **(_costs(own) if own else {}),
            }
        )
    return found


def _costs(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what complete texts took by token."""
    tokens = sum(row["tokens"] for row in rows)
    forwards = [row["forwards"] for row in rows if row["forwards"]]
    new = tokens - len(rows)  # the first token comes from reading the prompt
    return {
        "ms_per_token": 1e3 * sum(row["seconds"] - row["first"] for row in rows) / new,
        "ms_first": 1e3 * sum(row["first"] for row in rows) / len(rows),
        "calls_per_token": sum(row["calls"] for row in rows) / tokens,
        "up_per_token": sum(row["up"] for row in rows) / tokens,
        "down_per_token": sum(row["down"] - row["prompt_memory"] for row in rows) / tokens,
        "prompt_memory": sum(row["prompt_memory"] for row in rows) / len(rows),
        "tau": new / sum(forwards) if forwards else None,
    }


def table(found: Sequence[dict[str, Any]], temperature: float) -> str:
    """Return figures as tables in Markdown: milliseconds by profile, and traffic on a LAN.

    Args:
        found: figures, as `figures` returns them.
        temperature: temperature of the texts.
    """
    own = [row for row in found if row["temperature"] == temperature]
    profiles = list(dict.fromkeys(row["profile"] for row in own))
    methods = list(dict.fromkeys(row["method"] for row in own))
    cells = {(row["method"], row["profile"]): row for row in own}
    lines = [
        f"| T = {temperature:g} | tau | requests | bytes up | bytes down | kB of the prompt | "
        + " | ".join(profiles)
        + " | equal texts |",
        "|---" * (7 + len(profiles)) + "|",
    ]
    for method in methods:
        several = [cells[method, profile] for profile in profiles if (method, profile) in cells]
        first = next((cell for cell in several if cell["complete"]), None)
        times = [_time(cells.get((method, profile))) for profile in profiles]
        equal = f"{sum(r['exact'] for r in several)} of {sum(r['complete'] for r in several)}"
        lines.append("| " + " | ".join([method, *_traffic(first), *times, equal]) + " |")
    return "\n".join(lines) + "\n"


def _traffic(cell: dict[str, Any] | None) -> list[str]:
    """Return tau, requests and bytes of a cell, which are empty if no text has arrived."""
    if cell is None:
        return [""] * 5
    return [
        "" if cell["tau"] is None else f"{cell['tau']:.2f}",
        f"{cell['calls_per_token']:.2f}",
        f"{cell['up_per_token']:.0f}",
        f"{cell['down_per_token']:.0f}",
        f"{cell['prompt_memory'] / 1e3:.0f}",
    ]


def _time(cell: dict[str, Any] | None) -> str:
    """Return the milliseconds per token of a cell; "none" if a text is not complete."""
    if cell is None:
        return ""
    return f"{cell['ms_per_token']:.0f}" if cell["complete"] == cell["texts"] else "none"


def _stream_row(text: str | None, attempts: int, times: dict[str, Any]) -> dict[str, Any]:
    """Return what a streamed text took."""
    own = {"text": text, "calls": attempts, "repeats": attempts - 1, **times}
    return own | {"resumes": 0, "forwards": None, "prompt_memory": 0}


def _described(drafter: Drafter) -> dict[str, Any]:
    """Return the facts that identify a drafter, so that figures name their drafter."""
    if not isinstance(drafter, TrainedDrafter | SmallLMDrafter):
        return {"kind": type(drafter).__name__}
    model = drafter.model if isinstance(drafter, TrainedDrafter) else drafter.model.model
    found: dict[str, Any] = {
        "kind": type(drafter).__name__,
        "parameters": sum(own.numel() for own in model.parameters()),
    }
    if isinstance(drafter, TrainedDrafter):
        found["encoder"] = encoder_fingerprint(drafter.model)
        found["settings"] = drafter.model.config.settings.model_dump(mode="json")
    else:
        found["fingerprint"] = drafter.model.spec.fingerprint
    return found


def _row_bytes(drafter: Drafter, memory: RowEncoding) -> int:
    """Return the size of the memory of a token; 0 if the drafter reads tokens alone."""
    if not isinstance(drafter, TrainedDrafter):
        return 0
    return row_format(drafter.model, row_dtype(drafter.model), memory).num_bytes


def _read_stream(url: str, body: dict[str, Any]) -> tuple[str, float]:
    """Return the text of a stream, and the time at which its first piece came."""
    pieces: list[str] = []
    first = 0.0
    with (
        httpx2.Client(timeout=30.0) as client,
        client.stream("POST", f"{url}/completions", json=body) as response,
    ):
        response.raise_for_status()
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            pieces += [choice["text"] for choice in json.loads(data)["choices"]]
            first = first or time.monotonic()
    return "".join(pieces), first


def main() -> int:
    """Measure for some minutes, and write the figures so far; the exit code is 3 if some remain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--trained", action="append", default=[], metavar="NAME=DRAFTER")
    parser.add_argument("--lm", help="smaller model with the target's tokenizer")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each text")
    parser.add_argument("--capacity", type=int, default=512, help="tokens of prompt and text")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--profiles", nargs="*", default=list(PROFILES), choices=list(PROFILES))
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--json", type=Path, required=True)
    bench = Bench(parser.parse_args())
    is_complete = bench.run(60 * bench.arguments.minutes)
    bench.save()
    for temperature in bench.arguments.temperatures:
        sys.stdout.write(table(figures(bench.rows), temperature) + "\n")
    return 0 if is_complete else 3


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JakiroError as error:
        sys.exit(f"error: {error}")
