"""A lossless server passes, planted faults are found, and gaps of an interface are noted."""

import asyncio
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from helpers.false_server import Made, completion, events, false_server
from helpers.quick import mostly_slow
from helpers.serving import MODEL, Running, running, tiny_decoder
from torch import Tensor

from inference import SpeculativeDecoder
from inference.client.client import ServerClient
from inference.generation.incremental_text import IncrementalText
from inference.losslessness.reference import Reference
from inference.losslessness.server.check import verify_server
from inference.losslessness.server.records import ServerCheck, ServerReport, ServerVerifySettings
from inference.serving.scheduling.engine_thread import EngineThread
from jakiro.errors import PromptError, ResourceError

PROMPTS = ["def main(", "print(", [{"role": "user", "content": "Why?"}]]
SETTINGS = ServerVerifySettings(
    max_new_tokens=16, samples=300, sample_length=4, temperature=0.8, top_k=5
)
FEW = SETTINGS.model_copy(update={"samples": 150, "sampled_prompts": 1})


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tiny_decoder(trained=True), queue=512) as found:
        yield found


def _report(
    url: str,
    decoder: SpeculativeDecoder,
    settings: ServerVerifySettings = SETTINGS,
    prompts: Any = PROMPTS,
    **options: Any,
) -> ServerReport:
    async def verify() -> ServerReport:
        async with ServerClient(url) as client:
            await client.connect()
            model: Any = decoder.target.model
            assert decoder.tokenizer is not None
            return await verify_server(
                client, model, decoder.tokenizer, prompts, settings, **options
            )

    return asyncio.run(verify())


def _of(server: Running, **options: Any) -> ServerReport:
    return _report(server.url, server.server.engine.decoder, **options)


def _failed(report: ServerReport) -> set[str]:
    return {check.name for check in report.checks if not check.passed}


def test_a_lossless_server_passes_every_check(server: Running) -> None:
    heard: list[ServerCheck] = []
    settings = FEW.model_copy(update={"sampled_prompts": 2})
    report = _of(server, settings=settings, on_check=heard.append)
    assert report.passed
    assert tuple(heard) == report.checks
    names = ["seeds", "sequence distribution", "token ranks", "impossible tokens"]
    assert [check.name for check in report.checks] == ["greedy texts", *names, *names]
    greedy, seeds, sequences, ranks, support = report.checks[:5]
    assert (greedy.prompts, greedy.tokens, greedy.differences) == (3, 48, ())
    assert (seeds.texts, seeds.same) == (20, 20)
    assert sequences.counted == 150
    assert sequences.cells > 5
    assert ranks.counted > 200
    assert support.tokens > 350
    assert sequences.drafted > 0
    assert report.notes == ()
    assert "no draft was accepted in: greedy texts" in report.remarks[0]
    assert report.model == MODEL
    assert len(report.system_fingerprints) == 1
    assert report.summary == "9 of 9 checks passed"


def test_texts_are_sent_as_messages_if_wanted(server: Running) -> None:
    changes = {"chat": True, "samples": 60}
    report = _of(server, settings=FEW.model_copy(update=changes), prompts=["Why?", "How?"])
    assert report.passed
    assert report.notes == ()
    assert len(report.checks) == 5


def test_another_text_is_a_difference(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = IncrementalText.push

    def planted(text: IncrementalText, token_id: int) -> str:
        return correct(text, token_id).replace("a", "q").replace("e", "q")

    monkeypatch.setattr(IncrementalText, "push", planted)
    settings = SETTINGS.model_copy(update={"sampled_prompts": 0, "max_new_tokens": 60})
    report = _of(server, settings=settings)
    assert _failed(report) == {"greedy texts"}
    assert "rounding may be the cause" in report.summary


def test_drafts_that_distort_the_distribution_are_found(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sharpened(features: Tensor) -> Tensor:
        logits = correct(features)
        return logits * (8.0 if logits.shape[-2] > 1 else 1.0)  # trees, but not prompts

    target = server.server.engine.decoder.target
    correct = target.logits
    monkeypatch.setattr(target, "logits", sharpened)
    assert _failed(_of(server, settings=FEW)) & {"sequence distribution", "token ranks"}


@pytest.mark.slow
def test_another_temperature_is_found(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, temperature=lambda value: value and 0.4)
    assert "sequence distribution" in _failed(_of(server))


@pytest.mark.slow
def test_ignored_seeds_are_found(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, seed=lambda _: None)
    assert _failed(_of(server)) == {"seeds"}


@pytest.mark.slow
def test_ignored_top_k_is_found(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, top_k=lambda _: 50)
    assert "impossible tokens" in _failed(_of(server))


def _plant(monkeypatch: pytest.MonkeyPatch, **changes: Callable[[Any], Any]) -> None:
    """Change options of all requests on their way to the engine."""
    correct = EngineThread.prepare

    def planted(engine: EngineThread, prompt: Any, **options: Any) -> Any:
        for name, change in changes.items():
            options[name] = change(options.get(name))
        return correct(engine, prompt, **options)

    monkeypatch.setattr(EngineThread, "prepare", planted)


class _Simple:
    """A server that only returns texts, and refuses fields that it does not know.

    Args:
        decoder: decoder whose target it serves.
        refused: fields that it refuses.
        top_k: number of likeliest tokens among which it samples; 0 for all.
    """

    def __init__(self, decoder: SpeculativeDecoder, *refused: str, top_k: int = 5) -> None:
        self._decoder = decoder
        self._refused = refused
        ids = [int(token) for token in decoder.tokenizer("def main(")["input_ids"]]
        model: Any = decoder.target.model
        sampling = {"temperature": SETTINGS.temperature, "top_k": top_k, "top_p": 1.0}
        ((_, probs),) = Reference(model, ids, sampling).distributions([()])
        self._probs = probs.tolist()
        self._num_prompt = len(ids)
        self._source = Random(0)  # without seeds

    def __call__(self, _path: str, body: dict[str, Any]) -> Made:
        """Answer a completion request."""
        for field in self._refused:
            if field in body:
                return Made(422, {"error": {"message": f"unknown field {field}"}})
        usage = {"prompt_tokens": self._num_prompt, "completion_tokens": 1}
        if body["temperature"] == 0:
            text = self._greedy(body)
        else:
            source = Random(body["seed"]) if "seed" in body else self._source
            (token,) = source.choices(range(len(self._probs)), self._probs)
            text = str(self._decoder.tokenizer.decode([token], skip_special_tokens=True))
        found = completion(text, "length", usage=usage)
        return events(found) if body.get("stream") else Made(body=found)

    def _greedy(self, body: dict[str, Any]) -> str:
        with torch.inference_mode():
            output = self._decoder.generate(
                body["prompt"], temperature=0, max_new_tokens=body["max_tokens"]
            )
        return str(output.text)


@pytest.mark.parametrize(
    "refused",
    mostly_slow(
        [(), ("logprobs",), ("top_k", "logprobs", "seed")], quick=[("top_k", "logprobs", "seed")]
    ),
)
def test_what_a_server_does_not_offer_is_noted(refused: tuple[str, ...]) -> None:
    decoder = tiny_decoder()
    top_k = 0 if "top_k" in refused else 5
    settings = SETTINGS.model_copy(update={"top_k": top_k or None})
    with false_server(_Simple(decoder, *refused, top_k=top_k)) as url:
        report = _report(url, decoder, settings, ["def main("])
    assert report.passed
    names = {check.name for check in report.checks}
    assert ("seeds" in names) is ("seed" not in refused)
    assert names - {"seeds"} == {"greedy texts", "sequence distribution", "impossible tokens"}
    notes = " ".join(report.notes)
    assert "only the first token" in notes
    assert ("accepts no seeds" in notes) is ("seed" in refused)
    assert "does not report how many drafts were accepted" in notes
    assert report.checks[-1].tokens == SETTINGS.samples


def test_a_server_that_refuses_a_chosen_top_k_is_an_error() -> None:
    decoder = tiny_decoder()
    with (
        false_server(_Simple(decoder, "top_k")) as url,
        pytest.raises(ResourceError, match="unknown field top_k"),
    ):
        _report(url, decoder, prompts=["def main("])


def test_another_number_of_prompt_tokens_is_noted() -> None:
    decoder = tiny_decoder()
    simple = _Simple(decoder)
    simple._num_prompt = 99
    settings = SETTINGS.model_copy(update={"sampled_prompts": 0})
    with false_server(simple) as url:
        report = _report(url, decoder, settings, ["def main("])
    assert "the server counts 99" in report.notes[0]


def test_a_server_that_refuses_is_an_error(server: Running) -> None:
    settings = SETTINGS.model_copy(update={"max_new_tokens": 1000})
    with pytest.raises(ResourceError, match=r"does not answer a request.*status 400.*at most 256"):
        _of(server, settings=settings)
    decoder = server.server.engine.decoder

    def answer(_: str, body: dict[str, Any]) -> Made:
        is_greedy = body["temperature"] == 0
        return events(completion("a", "length")) if is_greedy else Made(500, b"oops")

    with false_server(answer) as url, pytest.raises(ResourceError, match="status 500: oops"):
        _report(url, decoder, prompts=["def main("])


def test_a_prompt_is_needed(server: Running) -> None:
    with pytest.raises(PromptError, match="no prompts to verify"):
        _of(server, prompts=[])
