"""A load on a real server loses nothing, and finds planted faults."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.false_server import Made, completion, events, false_server
from helpers.serving import Running, running, tiny_decoder

from inference.benchmark.server.document import LoadDocument, LoadSettings
from inference.benchmark.server.run import measure_load
from inference.generation.incremental_text import IncrementalText
from jakiro.errors import ConfigError, PromptError, ResourceError

TEXTS = ("def main(", "print(", "return 41", "import", "# naïve → 漢字\n")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with texts and a chat."""
    file = tmp_path_factory.mktemp("load") / "prompts.jsonl"
    chat = {"messages": [{"role": "user", "content": "Why?"}]}
    lines = [*({"prompt": text} for text in TEXTS), chat]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server with few places and a short queue."""
    with running(tiny_decoder(trained=True), places=4, queue=4) as found:
        yield found


def _measured(url: str, prompts: Path, **changes: Any) -> LoadDocument:
    values = {"max_new_tokens": 12, "concurrency": 6, "timeout": 30.0, **changes}
    return asyncio.run(measure_load(LoadSettings(url=url, prompts=str(prompts), **values)))


def test_a_mixed_load_loses_nothing_and_changes_no_answer(server: Running, prompts: Path) -> None:
    document = _measured(
        server.url,
        prompts,
        temperatures=(0.0, 1.0),
        requests=60,
        check=True,
        cut_share=0.2,
        bad_share=0.2,
        unstreamed_share=0.3,
    )
    figures = document.figures
    assert document.passed
    assert document.is_complete
    assert figures.requests == 60 == sum(figures.outcomes.values())
    assert set(figures.outcomes) == {"complete", "cut", "refused"}
    assert figures.errors == {}
    assert document.alone is not None
    assert document.alone.requests == 12
    assert document.alone.tokens == 12 * 12
    found = document.comparisons
    assert found is not None
    assert found.greedy + found.sampled == figures.outcomes["complete"] + figures.outcomes["cut"]
    assert min(found.greedy, found.sampled) > 10
    assert figures.tokens == 12 * figures.outcomes["complete"]
    assert figures.accepted is not None
    assert figures.rejected is not None
    assert figures.accepted > 0
    assert document.server.is_jakiro
    assert len(document.server.system_fingerprints) == 1
    assert Counter(record.outcome for record in document.requests) == figures.outcomes
    assert all(record.gaps == () for record in document.requests if not record.is_streamed)
    assert LoadDocument.model_validate_json(document.model_dump_json()) == document
    server.wait_until_idle()


def test_every_refused_client_comes_back_and_gets_its_answer(
    server: Running, prompts: Path
) -> None:
    document = _measured(server.url, prompts, requests=12, concurrency=12, max_new_tokens=40)
    figures = document.figures
    assert document.passed
    assert figures.outcomes == {"complete": 12}
    assert figures.refusals > 0
    assert figures.statuses["429"] == figures.refusals
    assert figures.longest_wait >= 1


def test_a_load_ends_after_its_seconds(server: Running, prompts: Path) -> None:
    document = _measured(server.url, prompts, seconds=0.5, concurrency=2)
    assert document.is_complete
    assert 0.5 <= document.figures.seconds < 10
    assert max(record.started for record in document.requests) < 0.5


def test_an_answer_that_changes_under_load_is_found(
    server: Running, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct = IncrementalText.push

    def planted(text: IncrementalText, token_id: int) -> str:
        found = correct(text, token_id)
        is_busy = server.server.engine.scheduler.num_running > 1
        return found.upper() if is_busy else found

    monkeypatch.setattr(IncrementalText, "push", planted)
    document = _measured(server.url, prompts, check=True, requests=15)
    assert not document.passed
    assert document.figures.outcomes == {"complete": 15}
    assert document.comparisons is not None
    assert document.comparisons.num_different > 0
    first = document.comparisons.differences[0]
    assert first.alone != first.loaded


def _load_on(answers: Iterator[Made], prompts: Path, **changes: Any) -> LoadDocument:
    def answer(_path: str, _body: dict[str, Any]) -> Made:
        return next(answers)

    with false_server(answer) as url:
        return _measured(url, prompts, concurrency=1, num_prompts=4, **changes)


def test_lost_answers_are_failures_and_missing_usage_is_counted(prompts: Path) -> None:
    good = events(completion("a", None), completion("b"))
    lost = events(completion("a", None), done=False)
    answers = iter([good, good, lost, Made(500, {"error": {"message": "oops"}}), good])
    document = _load_on(answers, prompts)
    figures = document.figures
    assert not document.passed
    assert not document.server.is_jakiro
    assert figures.outcomes == {"complete": 2, "failed": 2}
    assert figures.errors == {"the stream ended without [DONE]": 1, "oops": 1}
    assert figures.statuses == {"200": 3, "500": 1}
    assert (figures.counted_by_parts, figures.tokens) == (2, 4)
    assert figures.accepted is None


def test_a_server_that_accepts_bad_requests_fails(prompts: Path) -> None:
    good = events(completion("a"))
    body = Made(body=completion("a"))
    document = _load_on(iter([good, *[body] * 3]), prompts, bad_share=0.999, requests=3)
    assert document.figures.outcomes == {"failed": 3}
    assert all("was not refused" in error for error in document.figures.errors)


def test_a_measurement_can_be_interrupted(server: Running, prompts: Path) -> None:
    async def interrupted() -> LoadDocument:
        settings = LoadSettings(
            url=server.url, prompts=str(prompts), seconds=60, max_new_tokens=8, concurrency=2
        )
        first = asyncio.Event()

        def track(*_: object) -> Any:
            return first.set

        task = asyncio.ensure_future(measure_load(settings, track=track))
        await first.wait()
        task.cancel()
        return await task

    document = asyncio.run(interrupted())
    assert not document.is_complete
    assert 1 <= document.figures.outcomes["complete"] < 30


def test_mistakes_are_found_before_the_load(server: Running, prompts: Path) -> None:
    with pytest.raises(ConfigError, match="does not have this model"):
        _measured(server.url, prompts, model="other")
    with pytest.raises(PromptError, match="cannot read the prompts"):
        _measured(server.url, prompts.with_name("missing.jsonl"))
    with pytest.raises(ResourceError, match=r"does not answer a request.*status 400.*at most 256"):
        _measured(server.url, prompts, max_new_tokens=1000)
