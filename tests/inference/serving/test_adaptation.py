"""A server whose drafter learns: exact, one version per request, and nothing is kept when off."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import pytest
import torch
from helpers import false_learner
from helpers.chi_square import p_value, probs_of_continuations
from helpers.losslessness import LEAST_P_VALUE
from helpers.models import tiny_drafter, tiny_llama
from helpers.raw_http import wait_until
from helpers.serving import MODEL, SECONDS, Running, running, tiny_decoder
from openai import OpenAI
from safetensors.torch import save_file

from inference import SpeculativeDecoder
from inference.adaptation.lesson import LearningProcess
from inference.adaptation.versions import VersionFolder, VersionRecord, lock_of
from inference.adaptation.weights import ReplaceableWeights, adapted_names
from inference.protocol import RequestCounter
from inference.serving import adaptation, decoding_options
from inference.serving.adaptation import Adaptation, Learner
from inference.serving.decoding_options import DecodingOptions
from inference.serving.engine_thread import EngineThread
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter


def _weights_of(decoder: SpeculativeDecoder, scale: float) -> dict[str, torch.Tensor]:
    model: Any = decoder.drafter.model  # type: ignore[union-attr]
    parameters = dict(model.named_parameters())
    torch.manual_seed(0)
    return {
        name: parameters[name].detach() + scale * torch.randn_like(parameters[name])
        for name in adapted_names(model)
    }


def _learner(folder: Path, mode: str, weights: dict[str, torch.Tensor]) -> Learner:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "weights.safetensors")
    program = str(Path(false_learner.__file__))
    return Learner((sys.executable, program, mode, str(folder)), "drafter")


class _Served:
    """A server with a false learner, and the greedy texts that it must send."""

    def __init__(self, folder: Path, mode: str, scale: float = 0.3, **settings: Any) -> None:
        decoder = tiny_decoder(trained=True)
        self.folder = folder
        self.reference = SpeculativeDecoder(decoder.target.model, None, decoder.tokenizer)
        chosen = {
            "adapt": "shared",
            "adapt_every": 4,
            "adapt_idle_seconds": 0.0,
            "adapt_folder": folder / "versions",
            **settings,
        }
        self.running = Running(
            decoder, learner=_learner(folder, mode, _weights_of(decoder, scale)), **chosen
        )

    @property
    def adaptation(self) -> Adaptation:
        found = self.running.server.service.adaptation
        assert found is not None
        return found

    def ask(self, client: OpenAI, first: int, **changes: Any) -> Any:
        prompt = [1 + first % 50, 2 + first // 50, 3]
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, **changes}
        return client.completions.create(model=MODEL, prompt=prompt, **options)

    def expected(self, first: int) -> str:
        prompt = [1 + first % 50, 2 + first // 50, 3]
        output = self.reference.generate(prompt, temperature=0, max_new_tokens=12)
        return output.texts[0] if hasattr(output, "texts") else output.text

    def teach(self, client: OpenAI, begin: int, count: int = 16, **changes: Any) -> None:
        for first in range(begin, begin + count):
            self.ask(client, first, **changes)

    def metric(self, name: str, **labels: str) -> float:
        registry = self.running.server.service.telemetry.registry
        return registry.get_sample_value(f"jakiro_{name}", labels) or 0.0

    def close(self) -> None:
        self.running.server.drain()
        assert self.running.join() == 0


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., _Served]]:
    """A function that starts a server, which learns as soon as a few texts allow it."""
    monkeypatch.setattr(adaptation, "_FEWEST_HELD_OUT", 1)
    monkeypatch.setattr(adaptation, "_POLL_SECONDS", 0.02)
    started: list[_Served] = []

    def start(mode: str, **settings: Any) -> _Served:
        started.append(_Served(tmp_path, mode, **settings))
        return started[-1]

    yield start
    for served in started:
        served.close()


def test_without_the_option_nothing_is_kept(server: Running, client: OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="def", max_tokens=4)
    assert server.server.service.adaptation is None
    assert not server.server.engine.seed_obstacle
    assert "jakiro_adapt_tokens" not in httpx2.get(f"{server.root}/metrics").text


def test_texts_are_exact_while_versions_change(serve: Callable[..., _Served]) -> None:
    served = serve("better", places=2)
    with served.running.client() as client, ThreadPoolExecutor(2) as pool:
        first, changes = 0, 0.0
        end = time.monotonic() + 3 * SECONDS  # a loaded machine
        fingerprints: set[str] = set()
        while changes < 2:
            assert time.monotonic() < end
            changes = served.metric("adapt_changes_total", why="better")  # before the last answers
            answers = list(pool.map(lambda at: served.ask(client, at), range(first, first + 6)))
            texts = [answer.choices[0].text for answer in answers]
            assert texts == [served.expected(at) for at in range(first, first + 6)]
            fingerprints |= {answer.system_fingerprint for answer in answers}
            first = (first + 6) % 2000
            time.sleep(0.1)
    assert len(fingerprints) > 1  # the drafter's own weights, and versions


def _write_version(served: _Served, tenant: str = "everyone") -> VersionFolder:
    """Write version 1, which has learned from a user, and return the folder."""
    folder = served.adaptation._folder
    record = VersionRecord(
        number=1, parent=0, identity=folder.identity, tenants=(tenant,), before=2, after=3, low=1
    )
    folder.write(record, _weights_of(served.running.server.engine.decoder, 0.3))
    return folder


def test_a_change_waits_for_requests_in_preparation(
    serve: Callable[..., _Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, is_open, encode = serve("nothing"), Event(), decoding_options.encode_prompt

    def encode_late(*arguments: Any) -> list[int]:
        assert is_open.wait(SECONDS)
        return encode(*arguments)

    _write_version(served)
    with served.running.client() as client, ThreadPoolExecutor(1) as pool:
        before = served.ask(client, 5).system_fingerprint
        monkeypatch.setattr(decoding_options, "encode_prompt", encode_late)
        early = pool.submit(served.ask, client, 5)
        wait_until(lambda: served.adaptation._num_admitted == 1)
        served.adaptation._change = adaptation._Change(1, "better")
        time.sleep(4 * adaptation._POLL_SECONDS)
        assert served.adaptation.version == 0
        is_open.set()
        assert early.result(SECONDS).system_fingerprint == before
        wait_until(lambda: served.adaptation.version == 1)
        assert served.ask(client, 5).system_fingerprint != before


def test_a_change_that_fails_holds_no_requests_and_a_purge_forgets_a_version_that_stays(
    serve: Callable[..., _Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk has failed")

    served = serve("nothing")
    folder = _write_version(served)
    better = adaptation._Change(1, "better")
    monkeypatch.setattr(adaptation, "_SECONDS_AFTER_ERROR", 0.1)
    with served.running.client() as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.adaptation._used, "read", fail)
        served.adaptation._change = adaptation._Change(1, "worse")  # is tried again and again
        wait_until(lambda: served.adaptation._change == adaptation._Change(0, "worse"))
        assert served.ask(client, 5).choices[0].text == served.expected(5)
        served.adaptation._change = better
        wait_until(lambda: served.adaptation._change is None)
    served.adaptation._change = better
    wait_until(lambda: served.adaptation.version == 1)
    monkeypatch.setattr(VersionFolder, "remove", fail)
    assert httpx2.delete(f"{served.running.url}/adaptation").status_code == 500
    wait_until(lambda: served.adaptation.version == 0)
    assert folder.numbers == [1]


def test_a_lesson_that_starts_during_a_purge_is_ended(
    serve: Callable[..., _Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, begun = LearningProcess.start, list[LearningProcess]()

    async def start_after_a_purge(*arguments: Any) -> LearningProcess:
        await served.adaptation.purge("everyone")
        begun.append(await start(*arguments))
        return begun[-1]

    monkeypatch.setattr(LearningProcess, "start", start_after_a_purge)
    served = serve("slow")
    with served.running.client() as client:
        served.teach(client, 0, max_tokens=2)
    wait_until(lambda: bool(begun) and begun[-1].is_done)  # a slow lesson does not end by itself
    assert served.adaptation._process is None


def test_the_folder_of_the_versions_has_no_texts(serve: Callable[..., _Served]) -> None:
    served = serve("better")
    with served.running.client() as client:
        served.teach(client, 0)
        wait_until(lambda: served.adaptation.version >= 1)
    folder = served.adaptation._folder
    files = {path.name for path in (served.folder / "versions").rglob("*") if path.is_file()}
    assert files == {".lock", *(f"{number:06d}.safetensors" for number in folder.numbers)}
    record, weights, _ = folder.read(served.adaptation.version)
    assert record.model_dump_json().count("[") == 1  # of the tenants
    assert weights.keys() == _weights_of(served.running.server.engine.decoder, 0.3).keys()


def test_a_change_waits_until_no_request_is_decoded() -> None:
    model = tiny_llama(vocab=23)
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree="fixed")
    changes: list[int] = []
    with EngineThread(decoder, places=1, capacity=120) as engine:
        job = engine.submit([1, 2], temperature=0.0, max_new_tokens=100)
        next(iter(job))
        assert not engine.when_idle(lambda: changes.append(1)).result(SECONDS)
        waiting = engine.submit([1, 2], temperature=0.0, max_new_tokens=2)
        assert not engine.when_idle(lambda: changes.append(1)).result(SECONDS)
        list(job)
        list(waiting)
        assert changes == []
        assert engine.when_idle(lambda: changes.append(2)).result(SECONDS)
        failing = engine.when_idle(lambda: changes.index(7))
        with pytest.raises(ValueError, match="7"):
            failing.result(SECONDS)
        waiting = engine.submit([1, 2], temperature=0.0, max_new_tokens=2)
        engine.when_idle(lambda: None).cancel()
        list(waiting)
        assert engine.is_alive
    assert changes == [2]


@pytest.mark.slow
def test_weights_that_depend_on_a_text_do_not_change_the_distribution_of_the_next() -> None:
    model = tiny_llama(vocab=23, num_hidden_layers=1)
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree="fixed")
    drafter: Any = decoder.drafter
    drafter.request_counter = RequestCounter(first=2**61)
    weights, other = ReplaceableWeights(drafter.model), _weights_of(decoder, 2.0)
    prompt, sampling = [1, 2, 1, 2, 1], {"temperature": 1.5, "top_k": 3, "max_new_tokens": 2}
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(100):
        weights.use(None)
        first = decoder.generate(prompt, seed=seed, **sampling).new_token_ids
        weights.use(other if first[0] % 2 else None)
        second = decoder.generate(prompt, seed=seed, **sampling).new_token_ids
        counts[tuple(second)] += 1
    probs = probs_of_continuations(model, prompt, 2, temperature=1.5, top_k=3)
    assert p_value(counts, probs) > LEAST_P_VALUE


def test_a_seed_gives_other_random_numbers_to_each_request_of_a_server_that_learns(
    serve: Callable[..., _Served],
) -> None:
    served = serve("nothing")
    assert served.running.server.engine.seed_obstacle
    first, second = _request_indices(served)
    assert first != second
    with served.running.client() as client:
        answers = [served.ask(client, 0, temperature=1.0, seed=1) for _ in range(2)]
    assert answers[0].choices[0].text != answers[1].choices[0].text
    served.close()
    after = _request_indices(serve("nothing"))  # the next server with the same folder
    # Each server counts on, so their numbers must be far apart.
    assert abs(first - after[0]) > 1_000_000


def _request_indices(served: _Served) -> list[int]:
    """Return the numbers of two requests with the same seed, on which random numbers depend."""
    engine = served.running.server.engine
    options = DecodingOptions(seed=1, temperature=1.0, max_new_tokens=9)
    jobs = [engine.prepare([1, 2, 3], options) for _ in range(2)]
    return [job.request.sampling.request_index for job in jobs]


def _beats(served: _Served) -> int:
    path = served.folder / "alive"
    return path.stat().st_size if path.exists() else 0


@pytest.mark.usefixtures("slow_steps")
def test_nothing_is_learned_while_a_request_is_decoded(serve: Callable[..., _Served]) -> None:
    served = serve("slow")
    with served.running.client() as client:
        served.teach(client, 0, max_tokens=2)
        wait_until(lambda: _beats(served) > 5)
        stream = client.completions.create(
            model=MODEL, prompt="def", stream=True, temperature=0, max_tokens=25
        )
        next(iter(stream))
        before = _beats(served)
        list(stream)
        assert _beats(served) - before <= 1  # a beat may have been under way
        wait_until(lambda: _beats(served) > before + 5)


def _running_lesson(served: _Served) -> LearningProcess:
    """Return the process of the lesson, as soon as it learns."""
    wait_until(lambda: _beats(served) > 5)
    process = served.adaptation._process
    assert process is not None
    return process


@pytest.mark.slow
def test_a_lesson_with_old_texts_is_ended_even_if_the_server_is_busy(
    serve: Callable[..., _Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve("slow")
    with served.running.client() as client:
        served.teach(client, 0, max_tokens=2)
        process = _running_lesson(served)
        monkeypatch.setattr(served.adaptation, "_is_busy", lambda: True)
        served.ask(client, 0, max_tokens=2)
    time.sleep(4 * adaptation._POLL_SECONDS)
    assert process.is_paused
    assert not process.is_done
    monkeypatch.setattr(LearningProcess, "age", 24 * 3600.0 + 1)  # the default of adapt_hours
    wait_until(lambda: served.metric("adapt_lessons_total", outcome="failed") == 1)
    assert process.is_done
    assert served.adaptation._process is None


def test_a_purge_ends_a_running_lesson_with_texts_of_the_user(
    serve: Callable[..., _Served],
) -> None:
    served = serve("late", api_keys=("first-secret", "second-secret"))
    with served.running.client("first-secret") as client:
        served.teach(client, 0, max_tokens=2)
    process = _running_lesson(served)
    assert process.lesson.tenants == ("key 1",)
    assert _purged(served, "second-secret") == (0, 0)
    assert not process.is_done  # it has no texts of this user
    assert served.adaptation._process is process
    assert _purged(served, "first-secret") == (16, 0)
    assert process.is_done
    assert served.adaptation._process is None
    assert served.metric("adapt_lessons_total", outcome="purged") == 1
    (served.folder / "finish").touch()
    time.sleep(4 * adaptation._POLL_SECONDS)  # a result would be used
    assert served.adaptation.version == 0
    assert served.adaptation._folder.numbers == []
    for outcome in ("better", "failed"):
        assert served.metric("adapt_lessons_total", outcome=outcome) == 0


def _purged(served: _Served, key: str) -> tuple[int, int]:
    """Return the numbers of texts and of versions that a user has deleted."""
    header = {"Authorization": f"Bearer {key}"}
    found = httpx2.delete(f"{served.running.url}/adaptation", headers=header).json()
    return found["texts"], found["versions"]


def test_a_request_can_forbid_learning_and_texts_are_forgotten(
    serve: Callable[..., _Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve("nothing")
    with served.running.client() as client:
        served.ask(client, 1, extra_body={"store": False})
        served.running.wait_until_idle()
        assert served.metric("adapt_tokens") == 0
        served.ask(client, 3)
        wait_until(lambda: served.metric("adapt_tokens") == 15)
    # A text is forgotten in time even if the server is busy.
    monkeypatch.setattr(served.adaptation, "_is_busy", lambda: True)
    monkeypatch.setattr(served.adaptation._ring, "_max_seconds", 0.0)
    wait_until(lambda: served.metric("adapt_tokens") == 0)


@pytest.mark.slow
@pytest.mark.usefixtures("slow_steps")
def test_requests_wait_for_a_change_that_waits_for_earlier_ones(
    serve: Callable[..., _Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve("better", places=2)
    with served.running.client() as client, ThreadPoolExecutor(2) as pool:
        served.teach(client, 0)
        wait_until(lambda: served.adaptation.version == 1)
        stream = client.completions.create(
            model=MODEL, prompt="def", stream=True, temperature=0, max_tokens=40
        )
        next(iter(stream))
        assert _purged(served, "none") == (16, 1)
        wait_until(lambda: not served.adaptation._admits.is_set())
        late = pool.submit(served.ask, client, 5)
        time.sleep(4 * adaptation._POLL_SECONDS)
        assert not late.done()
        assert served.adaptation.version == 1  # the stream keeps its version
        list(stream)
        assert late.result(SECONDS).choices[0].text == served.expected(5)
        assert served.adaptation.version == 0
        assert served.adaptation._admits.is_set()


@pytest.mark.slow
def test_a_version_that_does_harm_is_forgotten(serve: Callable[..., _Served]) -> None:
    served = serve("harmful after 1")
    with served.running.client() as client:
        served.teach(client, 0)
        wait_until(lambda: served.adaptation.version == 1)
        served.teach(client, 100, 40)
        wait_until(lambda: served.metric("adapt_lessons_total", outcome="harmful") == 1)
        wait_until(lambda: served.metric("adapt_changes_total", why="worse") == 1)
        assert served.adaptation.version == 0
        assert 1 not in served.adaptation._folder.numbers
        assert served.ask(client, 3).choices[0].text == served.expected(3)


@pytest.mark.slow
def test_a_purge_ends_a_lesson_that_goes_on_from_a_version_of_the_user(
    serve: Callable[..., _Served],
) -> None:
    served = serve("late", api_keys=("first-secret", "second-secret"))
    folder = _write_version(served, "key 2")
    served.adaptation._used.number = 1
    with served.running.client("first-secret") as client:
        served.teach(client, 0, max_tokens=2)
    process = _running_lesson(served)
    assert (process.lesson.tenants, process.lesson.parent) == (("key 1",), 1)
    assert _purged(served, "second-secret") == (0, 1)
    assert process.is_done
    (served.folder / "finish").touch()
    wait_until(lambda: served.adaptation.version == 0)
    assert folder.numbers == []


@pytest.mark.slow  # quick tests: those of VersionFolder
def test_the_next_server_goes_on_with_the_newest_version(serve: Callable[..., _Served]) -> None:
    served = serve("better", adapt_every=30)
    with served.running.client() as client:
        served.teach(client, 0, count=40)
        wait_until(lambda: served.adaptation.version == 1)
        fingerprint = served.ask(client, 3).system_fingerprint
    folder = VersionFolder(served.adaptation._folder.path, served.adaptation._folder.identity)
    with pytest.raises(ConfigError, match="another process uses"):
        lock_of(served.folder / "versions")
    served.close()
    (folder.path / "000002.safetensors").touch()  # a disk that was full
    again = serve("nothing", adapt_every=1000)
    assert again.adaptation.version == 1
    with again.running.client() as client:
        answer = again.ask(client, 3)
        assert answer.system_fingerprint == fingerprint
        assert answer.choices[0].text == again.expected(3)


def test_a_user_forgets_the_own_texts_only() -> None:
    learner = Learner(("false",), "drafter")
    keys = ("first-secret", "second-secret")
    with running(tiny_decoder(trained=True), learner, adapt="shared", api_keys=keys) as served:
        adaptation = served.server.service.adaptation
        assert adaptation is not None
        for number, key in enumerate(keys, 1):
            with served.client(key) as client:
                for first in range(2 * number):
                    client.completions.create(model=MODEL, prompt=[first, 7], max_tokens=3)
        wait_until(lambda: len(adaptation._ring) == 6)
        url = f"{served.url}/adaptation"
        assert httpx2.delete(url).status_code == 401
        assert len(adaptation._ring) == 6
        deleted = httpx2.delete(url, headers={"Authorization": "Bearer second-secret"})
        assert deleted.json() == {
            "object": "adaptation.deleted",
            "deleted": True,
            "texts": 4,
            "versions": 0,
        }
        assert len(adaptation._ring) == 2
        assert adaptation._ring.traffic(9, 9).tenants == ("key 1",)
