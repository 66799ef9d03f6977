"""Program that measures adaptation to a stream that changes its domain: `make bench-adaptation`.

The stream has requests about code, then articles to summarize, then code again. Each request is
decoded greedily with three drafters: frozen; adapted, which learns from the stream with the program
of the server, and changes only after the same comparison; and trained offline on other texts of the
domain. Lessons follow each other after a fixed number of requests, and later requests are not
watched. All three give the same text, which is checked; in half precision, the target is
batch-invariant, so that rounding does not matter. Prompts of the first quarter of each file teach
the offline drafters, and the others are the stream.

A run can be interrupted at any time, and goes on where it has stopped:

    make bench-adaptation ARGS="--code CODE.jsonl --articles ARTICLES.jsonl --folder WORK
                                --minutes 3 --json RESULT.json"
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from inference.adaptation.lesson import Lesson, LessonResult, Passage, Recipe, read_result
from inference.adaptation.traffic import TrafficRing
from inference.adaptation.versions import VersionFolder
from inference.adaptation.weights import ReplaceableWeights, adapted_names, identity_of_drafter
from inference.benchmark.machine import environment_of
from inference.benchmark.stats import interval_of, pooled_ratio, resample_counts
from inference.benchmark.stored_parts import continued_document, parts_of
from inference.decoder import SpeculativeDecoder
from inference.drafters.trained.drafter import TrainedDrafter
from inference.generation.prompt_file import BenchPrompt, read_prompts
from inference.generation.prompts import encode_prompt
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.dtype_names import dtype_name
from jakiro.utils.files import checksum, write_atomically
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer
from training.online.gate import FEWEST
from training.online.learner import teach

ARMS = ("frozen", "adapted", "offline")
CODE, ARTICLES = "code", "articles"
OFFLINE_PASSES = 8
MOST_LEARNED, MOST_HELD_OUT = 256, 32  # as in the server


class Request(NamedTuple):
    """A prompt of the stream."""

    stage: int
    domain: str
    prompt: BenchPrompt


class Bench:
    """The stream, the drafters, and what was measured so far.

    Args:
        arguments: arguments of the program.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.folder: Path = arguments.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        prompts = {CODE: read_prompts(arguments.code), ARTICLES: read_prompts(arguments.articles)}
        self.taught = {name: own[: len(own) // 4] for name, own in prompts.items()}
        self.stream = list(_stream({n: own[len(own) // 4 :] for n, own in prompts.items()}))
        self.tokenizer = load_tokenizer(arguments.target)
        model = load_causal_lm(arguments.target, dtype=arguments.dtype).requires_grad_(False)
        self.target = TargetAdapter(model)
        self.own = JakiroDrafter.from_pretrained(arguments.drafter).float().eval()
        spec = self.target.spec
        self.identity = identity_of_drafter(self.own, spec.fingerprint, self.target.dtype)
        self.versions = VersionFolder(self.folder / "versions", self.identity)
        self.recipe = Recipe(learning_rate=arguments.learning_rate)
        self._refuse_other_parts()
        self.lines = _read_lines(self.folder / "stream.jsonl")
        self.ring = TrafficRing(10**9, 1e9)
        self._decoders = {arm: self._new_decoder() for arm in ARMS}

    def _refuse_other_parts(self) -> None:
        """Store what the figures depend on; refuse a folder that was begun with other parts."""
        own = self.arguments
        parts = parts_of(
            self.target,
            {},
            [],
            drafter=self.identity,
            code=checksum(own.code),
            articles=checksum(own.articles),
            **{name: getattr(own, name) for name in ("tokens", "every", "offline")},
            **self.recipe.model_dump(),
        )
        path = self.folder / "parts.json"
        if (self.folder / "stream.jsonl").exists() and not path.exists():
            raise ConfigError(
                f"{self.folder} was begun by an earlier version of this program",
                expected=path.name,
                got="no such file",
                remedy="choose another --folder",
            )
        document = continued_document(path, parts)
        write_atomically(path, json.dumps(document, indent=1) + "\n")

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The requests that were measured."""
        return [line for line in self.lines if "domain" in line]

    @property
    def lessons(self) -> list[dict[str, Any]]:
        """The lessons so far: each is one training on recent texts."""
        return [line for line in self.lines if "lesson" in line]

    def run(self, seconds: float) -> bool:
        """Measure until the time is over, and return whether the stream is complete."""
        end = time.monotonic() + seconds
        for line in self.requests:
            self.ring.add("everyone", line["token_ids"], line["prompt_length"])
        version = 0
        for lesson in (own["lesson"] for own in self.lessons):
            version = 0 if lesson["outcome"] == "harmful" else lesson["version"] or version
        self._use("adapted", self.versions.read(version).weights if version else None)
        stage = -1
        while len(self.requests) < len(self.stream) and time.monotonic() < end:
            count = len(self.requests)
            if count and count % self.arguments.every == 0 and not self._has_learned(count):
                version = self._learn(count, version)
                continue
            request = self.stream[count]
            if stage != request.stage:
                stage = request.stage
                self._use("offline", self._offline(request.domain))
            self._measure(request, version)
        return len(self.requests) == len(self.stream)

    def _has_learned(self, count: int) -> bool:
        return any(own["after"] == count for own in self.lessons)

    def _measure(self, request: Request, version: int) -> None:
        """Decode a request with all drafters, and keep its counts."""
        ids = encode_prompt(request.prompt.first, self.tokenizer, self.target.spec.vocab_size)
        counts, texts = {}, []
        for arm, decoder in self._decoders.items():
            output = decoder.generate(ids, max_new_tokens=self.arguments.tokens, temperature=0)
            counts[arm] = [output.stats.decoded, output.stats.target_forwards]
            texts.append(output.new_token_ids)
        tokens = [*ids, *texts[0]]
        self.ring.add("everyone", tokens, len(ids))
        self._append(
            {
                "domain": request.domain,
                "stage": request.stage,
                "version": version,
                "counts": counts,
                "is_exact": texts[0] == texts[1] == texts[2],
                "token_ids": tokens,
                "prompt_length": len(ids),
            }
        )

    def _learn(self, count: int, version: int) -> int:
        """Let the server's learning program learn once, and return the version to use."""
        traffic = self.ring.traffic(MOST_LEARNED, MOST_HELD_OUT)
        if len(traffic.held_out) < FEWEST:
            self._append({"after": count, "lesson": {"outcome": "skipped", "version": None}})
            return version
        lesson = self._lesson(
            number=max([version, *self.versions.numbers]) + 1,
            parent=version,
            learned=[Passage(token_ids=t[1], prompt_length=t[2]) for t in traffic.learned],
            held_out=[Passage(token_ids=t[1], prompt_length=t[2]) for t in traffic.held_out],
            seed=count,
        )
        done = subprocess.run(
            [sys.executable, "-m", "training.online.learner"],
            input=lesson.model_dump_json().encode(),
            stdout=subprocess.PIPE,
            check=False,
        )
        result: LessonResult = read_result(done.stdout)
        sizes = {"learned": len(lesson.learned), "held_out": len(lesson.held_out)}
        self._append({"after": count, "lesson": {**result.model_dump(), **sizes}})
        if result.outcome == "harmful":
            self._use("adapted", None)
            return 0
        if result.version is None:
            return version
        self._use("adapted", self.versions.read(result.version).weights)
        return result.version

    def _lesson(self, **changes: Any) -> Lesson:
        given: dict[str, Any] = {
            "folder": self.versions.path,
            "number": 1,
            "parent": 0,
            "drafter": self.arguments.drafter,
            "target": self.arguments.target,
            "identity": self.identity,
            "dtype": dtype_name(self.target.dtype),
            "device": "cpu",
            "tenants": ("everyone",),
            "recipe": self.recipe,
            **changes,
        }
        return Lesson(**given)

    def _offline(self, domain: str) -> Mapping[str, torch.Tensor]:
        """Return the weights of a drafter that was trained on other texts of a domain."""
        path = self.folder / f"offline-{domain}.safetensors"
        if not path.exists():
            decoder = self._decoders["frozen"]
            generate = partial(decoder.generate, temperature=0)
            passages = []
            for prompt in self.taught[domain][: self.arguments.offline]:
                ids = encode_prompt(prompt.first, self.tokenizer, self.target.spec.vocab_size)
                new = generate(ids, max_new_tokens=self.arguments.tokens).new_token_ids
                if new:
                    passages.append(Passage(token_ids=(*ids, *new), prompt_length=len(ids)))
            recipe = self.recipe.model_copy(update={"passes": OFFLINE_PASSES})
            lesson = self._lesson(learned=passages, held_out=passages[:1], recipe=recipe)
            state = teach(self.target, self.own, lesson).state_dict()
            names = adapted_names(self.own)
            save_file({name: state[name].contiguous() for name in names}, path)
        return load_file(path)

    def _new_decoder(self) -> SpeculativeDecoder:
        drafter = JakiroDrafter.from_pretrained(self.arguments.drafter).float()
        used = TrainedDrafter.for_target(drafter, self.target, self.tokenizer)
        is_half = self.target.dtype != torch.float32
        return SpeculativeDecoder(
            self.target.model, used, self.tokenizer, tree="fixed", batch_invariant=is_half
        )

    def _use(self, arm: str, weights: Mapping[str, torch.Tensor] | None) -> None:
        drafter: Any = self._decoders[arm].drafter
        state = self.own.state_dict() if weights is None else weights
        replaced = ReplaceableWeights(drafter.model)
        replaced.use({name: state[name] for name in adapted_names(drafter.model)})

    def _append(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with (self.folder / "stream.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def summary(bench: Bench) -> dict[str, Any]:
    """Return all measured values, without texts."""
    requests = bench.requests
    stages = sorted({own["stage"] for own in requests})
    return {
        "environment": environment_of(bench.target, bench.arguments.target).model_dump(mode="json"),
        "target": bench.arguments.target,
        "new_tokens": bench.arguments.tokens,
        "every": bench.arguments.every,
        "recipe": bench.recipe.model_dump(),
        "num_exact": sum(own["is_exact"] for own in requests),
        "stages": [
            {
                "domain": own[0]["domain"],
                "requests": len(own),
                "halves": [_figures(half) for half in (own[: len(own) // 2], own[len(own) // 2 :])],
                **_figures(own),
            }
            for own in ([r for r in requests if r["stage"] == stage] for stage in stages)
        ],
        "lessons": [{"num_requests": own["after"], **own["lesson"]} for own in bench.lessons],
        "requests": [{key: own[key] for key in ("stage", "version", "counts")} for own in requests],
    }


def _figures(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tau of each drafter, and its ratio to the frozen one with a 95% interval."""
    if not requests:
        return {}
    counts = {arm: np.array([own["counts"][arm] for own in requests], dtype=float) for arm in ARMS}
    resamples = resample_counts(len(requests))
    figures: dict[str, Any] = {}
    for arm, own in counts.items():
        tokens, steps = own.sum(axis=0)
        figures[arm] = {"tau": float(tokens / max(steps, 1))}
        if arm != "frozen":
            base = counts["frozen"]
            tau = pooled_ratio(own[:, 0], own[:, 1], resamples)
            ratios = tau / pooled_ratio(base[:, 0], base[:, 1], resamples)
            value = figures[arm]["tau"] / figures["frozen"]["tau"]
            figures[arm]["over_frozen"] = interval_of(value, ratios)._asdict()
    return figures


def _stream(prompts: Mapping[str, Sequence[BenchPrompt]]) -> Iterator[Request]:
    """Yield code, articles, and other code."""
    code, articles = prompts[CODE], prompts[ARTICLES]
    half = len(code) // 2
    for stage, (domain, own) in enumerate(
        ((CODE, code[:half]), (ARTICLES, articles), (CODE, code[half:]))
    ):
        for prompt in own:
            yield Request(stage, domain, prompt)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; an incomplete last line is removed from the file."""
    if not path.exists():
        return []
    *whole, _ = path.read_bytes().split(b"\n")
    write_atomically(path, b"".join(line + b"\n" for line in whole))
    return [json.loads(line) for line in whole]


def main() -> int:
    """Measure for some minutes, and write the figures; the exit code is 3 if requests remain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", help="dtype of the target")
    parser.add_argument("--code", type=Path, required=True)
    parser.add_argument("--articles", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each request")
    parser.add_argument("--every", type=int, default=20, help="requests between two lessons")
    parser.add_argument("--offline", type=int, default=40, help="texts of an offline training")
    parser.add_argument("--learning-rate", type=float, default=Recipe().learning_rate)
    parser.add_argument("--json", type=Path, required=True)
    bench = Bench(parser.parse_args())
    is_complete = bench.run(60 * bench.arguments.minutes)
    write_atomically(bench.arguments.json, json.dumps(summary(bench), indent=1) + "\n")
    sys.stderr.write(f"{len(bench.requests)} of {len(bench.stream)} requests\n")
    return 0 if is_complete else 3


if __name__ == "__main__":
    sys.exit(main())
