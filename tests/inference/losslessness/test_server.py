"""A lossless server passes, planted faults are found, and gaps of an interface are noted."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.false_server import Made, completion, false_server
from helpers.models import tiny_llama
from helpers.serving import MODEL, Running, running, tiny_decoder
from helpers.tokenizers import tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from inference import SpeculativeDecoder
from inference.client import ServerAnswer, ServerClient
from inference.generation.incremental_text import IncrementalText
from inference.losslessness.records import Report, VerifySettings
from inference.losslessness.reference import Reference, Tokens
from inference.losslessness.sampled import compare_samples
from inference.losslessness.server import NamedReference, compare_text, verify_server
from inference.serving.scheduling.engine_thread import EngineThread
from jakiro.errors import ResourceError
from jakiro.utils.token_text import REPLACEMENT

PROMPTS = ["def main(", "print(", [{"role": "user", "content": "Why?"}]]
SETTINGS = VerifySettings(max_new_tokens=16, samples=300, sample_length=4, temperature=0.8, top_k=5)
FEW = SETTINGS.model_copy(update={"samples": 150, "sampled_prompts": 1})
LENGTH = 12
PROMPT = [70, 71]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tiny_decoder(trained=True), queue=512) as server:
        yield server


def _report(
    url: str,
    decoder: SpeculativeDecoder,
    settings: VerifySettings = SETTINGS,
    prompts: Any = PROMPTS,
) -> Report:
    client = ServerClient(url)
    client.connect()
    model: Any = decoder.target.model
    assert decoder.tokenizer is not None
    try:
        return verify_server(client, model, decoder.tokenizer, prompts, settings)
    finally:
        client.close()


def _of(server: Running, **options: Any) -> Report:
    return _report(server.url, server.server.engine.decoder, **options)


def _failed(report: Report) -> set[str]:
    return {check.name for check in report.checks if not check.passed}


def test_a_lossless_server_passes_every_check(server: Running) -> None:
    report = _of(server, settings=FEW)
    assert report.passed
    names = ["seeds", "sequence distribution", "token ranks", "impossible tokens"]
    assert [check.name for check in report.checks] == ["greedy texts", *names]
    greedy, seeds, sequences, ranks, support = report.checks
    assert (greedy.prompts, greedy.tokens, greedy.differences) == (3, 48, ())
    assert (seeds.texts, seeds.same) == (20, 20)
    assert sequences.counted == 150
    assert sequences.cells > 5
    assert ranks.counted > 200
    assert support.tokens > 350
    assert sequences.drafted > 0
    assert report.notes == ()
    assert report.model == MODEL
    assert len(report.system_fingerprints) == 1


def test_another_text_is_a_difference(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = IncrementalText.push

    def planted(text: IncrementalText, token_id: int) -> str:
        return correct(text, token_id).replace("a", "q").replace("e", "q")

    monkeypatch.setattr(IncrementalText, "push", planted)
    settings = SETTINGS.model_copy(update={"sampled_prompts": 0, "max_new_tokens": 60})
    assert _failed(_of(server, settings=settings)) == {"greedy texts"}


@pytest.mark.slow
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
@pytest.mark.parametrize(
    ("option", "change", "check"),
    [
        ("temperature", lambda value: value and 0.4, "sequence distribution"),
        ("seed", lambda _: None, "seeds"),
        ("others", lambda own: {**own, "top_k": 50}, "impossible tokens"),
    ],
)
def test_an_ignored_option_is_found(
    server: Running,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    change: Callable[[Any], Any],
    check: str,
) -> None:
    correct = EngineThread.prepare

    def planted(engine: EngineThread, prompt: Any, options: Any, **others: Any) -> Any:
        changed = replace(options, **{option: change(getattr(options, option))})
        return correct(engine, prompt, changed, **others)

    monkeypatch.setattr(EngineThread, "prepare", planted)
    assert check in _failed(_of(server))


@pytest.mark.slow
def test_what_a_server_does_not_offer_is_noted() -> None:
    decoder = tiny_decoder()

    def answer(_path: str, body: dict[str, Any]) -> Made:
        options = {"max_new_tokens": body["max_tokens"], "temperature": body["temperature"]}
        output = decoder.generate(body["prompt"], seed=body.get("seed"), **options)
        return Made(body=completion(str(output.text), "length", usage={"prompt_tokens": 99}))

    with false_server(answer) as url:
        report = _report(url, decoder, SETTINGS, ["def main("])
    assert report.passed
    assert {check.name for check in report.checks} == {"greedy texts", "seeds"}
    notes = " ".join(report.notes)
    assert "does not name the tokens" in notes
    assert "does not report how many drafts were accepted" in notes
    assert "the server counts 99" in notes


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tiny_llama(vocab=300), PROMPT)


def _compare(
    reference: Reference, tokenizer: PreTrainedTokenizerFast, text: str, reason: str = "length"
) -> tuple[int, Any]:
    answer = ServerAnswer(text, finish_reason=reason)
    return compare_text(reference, tokenizer, answer, LENGTH, 1)


def _decoded(tokenizer: PreTrainedTokenizerFast, tokens: Tokens) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def test_the_first_difference_is_found(
    reference: Reference, tokenizer: PreTrainedTokenizerFast
) -> None:
    own = reference.greedy(LENGTH)
    assert _compare(reference, tokenizer, _decoded(tokenizer, own)) == (LENGTH, None)
    letters = tokenizer.convert_tokens_to_ids(["q", "z"])
    other = next(token for token in letters if token != own[4])
    text = _decoded(tokenizer, (*own[:4], other, *own[5:]))
    equal, difference = _compare(reference, tokenizer, text)
    assert (equal, difference.prompt, difference.position) == (4, 1, 5)
    assert (difference.target_token, difference.decoder_token) == (own[4], other)
    assert difference.gap is not None
    assert difference.gap > 0 == difference.rounding
    assert not difference.is_near_tie
    assert difference.server_text.startswith(tokenizer.decode([other]))


def test_the_end_of_a_text_must_be_the_targets_own(tokenizer: PreTrainedTokenizerFast) -> None:
    endless = Reference(tiny_llama(vocab=300), PROMPT)
    own = endless.greedy(LENGTH)
    size = next(n for n in range(3, LENGTH) if own[n] not in own[:n])
    reference = Reference(tiny_llama(vocab=300, eos_token_id=own[size]), PROMPT)
    assert reference.greedy(LENGTH) == own[: size + 1]
    text = _decoded(tokenizer, own[:size])
    assert _compare(reference, tokenizer, text, "stop") == (size + 1, None)
    assert _compare(endless, tokenizer, text, "stop")[1] is not None
    _, difference = _compare(reference, tokenizer, _decoded(tokenizer, own))
    assert difference.target_token == own[size]


def test_near_ties_of_half_precision_pass(tokenizer: PreTrainedTokenizerFast) -> None:
    class Tied(Reference):
        """A reference in which the likeliest two tokens have nearly equal logits."""

        def greedy_scores(self, prefix: Tokens) -> Tensor:
            scores = super().greedy_scores(prefix).clone()
            first, second = scores.topk(2).indices.tolist()
            scores[second] = scores[first] * (1 - 2.0**-8)
            return scores

    reference = Tied(tiny_llama(vocab=300).to(torch.bfloat16), PROMPT)
    own = reference.greedy(LENGTH)
    for position in range(LENGTH):
        second = int(reference.greedy_scores(own[:position]).topk(2).indices[1])
        text = _decoded(tokenizer, (*own[:position], second))
        before = _decoded(tokenizer, own[:position])
        piece = text[len(before) :]
        is_whole = not before.endswith(REPLACEMENT)
        if is_whole and piece.isascii() and piece and not _decoded(tokenizer, own).startswith(text):
            break
    assert _compare(reference, tokenizer, text)[1].is_near_tie


def _reference(
    tokenizer: PreTrainedTokenizerFast, vocab: int = 300, **model: Any
) -> NamedReference:
    sampling = {"temperature": 1.0, "top_k": 6}
    return NamedReference(tiny_llama(vocab=vocab, **model), PROMPT, sampling, tokenizer)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_of_the_target_pass_and_others_do_not(
    tokenizer: PreTrainedTokenizerFast, temperature: float
) -> None:
    torch.manual_seed(3)
    ids = torch.tensor([PROMPT] * 400)
    sampled = tiny_llama(vocab=300).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=3,
        temperature=temperature,
        top_k=6,
        pad_token_id=0,
    )
    reference = _reference(tokenizer)
    sequences = [
        reference.tokens_of(ServerAnswer("", tuple(tokenizer.decode([token]) for token in tokens)))
        for tokens in sampled[:, len(PROMPT) :].tolist()
    ]
    by_sequence, _, support = compare_samples(reference, sequences, 3, None, 1, VerifySettings())
    assert by_sequence.passed is (temperature == 1.0)
    assert support.passed


def test_tokens_are_read_up_to_the_first_ambiguous_one(tokenizer: PreTrainedTokenizerFast) -> None:
    reference = _reference(tokenizer, eos_token_id=0)
    assert len(reference.tokens_of(ServerAnswer("", (REPLACEMENT, "a", "b")))) == 1
    for names in (("a", "</s>"), ("a",)):  # the end of a text may have a name or not
        assert len(reference.tokens_of(ServerAnswer("a", names, "stop"))) == 2
    with pytest.raises(ResourceError, match="tokens are not those of the target"):
        reference.tokens_of(ServerAnswer("Ġa", ("Ġa nonsense",)))


def test_tokens_with_the_same_name_are_a_group(tokenizer: PreTrainedTokenizerFast) -> None:
    reference = _reference(tokenizer, 310, eos_token_id=[0, 2])
    assert reference.groups[:4].tolist() == [0, 1, 0, 3]  # all ends of texts are one group
    assert reference.tokens_of(ServerAnswer("", ("</s>",))) == (0,)
    assert tokenizer.convert_tokens_to_ids("a") not in reference.shared
    (part,) = reference.tokens_of(ServerAnswer("", (REPLACEMENT,)))
    group = reference.groups == part
    assert group.sum() > 100  # bytes that are no character of their own
    plain = Reference(reference.model, PROMPT, reference.sampling)
    ((_, own),), ((_, grouped),) = (list(one.distributions([()])) for one in (plain, reference))
    assert float(grouped[part]) == pytest.approx(float(own[group].sum()))
    assert float(grouped.sum()) == pytest.approx(1.0)
