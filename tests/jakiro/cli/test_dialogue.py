"""A dialogue answers, keeps what was written, and executes commands, all without a terminal."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from helpers.models import tiny_drafter, tiny_llama
from helpers.templates import family_tokenizer

from inference import SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter
from jakiro.cli.dialogue import Dialogue, DialogueSettings
from jakiro.errors import PromptError
from jakiro.target.adapter import TargetAdapter


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    tokenizer = family_tokenizer("chatml")
    model = tiny_llama(vocab=len(tokenizer), max_position_embeddings=256)
    return SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tokenizer, tree="fixed")


@pytest.fixture
def dialogue(decoder: SpeculativeDecoder) -> Iterator[Dialogue]:
    with closing(Dialogue(decoder, DialogueSettings(max_new_tokens=12))) as dialogue:
        yield dialogue


def _text(dialogue: Dialogue, question: str) -> str:
    return "".join(piece.text for piece in dialogue.answer(question))


def test_answers_are_those_of_the_decoder_for_all_messages(
    dialogue: Dialogue, decoder: SpeculativeDecoder
) -> None:
    messages: list[dict[str, str]] = []
    for question in ("main", "return", "print"):
        messages.append({"role": "user", "content": question})
        expected = decoder.generate(messages, max_new_tokens=12)
        assert _text(dialogue, question) == expected.text
        messages.append({"role": "assistant", "content": expected.text or ""})
    assert dialogue.messages == messages
    assert dialogue.total.emitted == 36


def test_pieces_have_the_depths_of_their_tokens(decoder: SpeculativeDecoder) -> None:
    target, tokenizer = decoder.target.model, decoder.tokenizer
    lookup = SpeculativeDecoder(target, LookupDrafter(), tokenizer, tree="fixed")
    expected = lookup.generate([{"role": "user", "content": "main"}], max_new_tokens=60)
    with closing(Dialogue(lookup, DialogueSettings(max_new_tokens=60))) as dialogue:
        depths = [piece.depth for piece in dialogue.answer("main")]
    assert any(depths), "this test needs accepted drafts"
    assert set(depths) <= set(expected.depths)
    assert dialogue.last.accepted == expected.stats.accepted
    assert dialogue.last.tau == expected.stats.tau


def test_an_interrupted_answer_stays_in_the_chat(
    dialogue: Dialogue, decoder: SpeculativeDecoder
) -> None:
    with closing(dialogue.answer("main")) as pieces:
        written = next(pieces).text
    whole = decoder.generate([{"role": "user", "content": "main"}], max_new_tokens=12).text
    assert len(written) < len(whole or "")
    assert dialogue.messages[-1] == {"role": "assistant", "content": written}
    question = {"role": "user", "content": "return"}
    expected = decoder.generate([*dialogue.messages, question], max_new_tokens=12).text
    assert _text(dialogue, "return") == expected


def test_an_interrupted_forward_pass_leaves_a_usable_dialogue(
    dialogue: Dialogue, decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TargetAdapter.logits
    calls = iter(range(100))

    def interrupted(self: TargetAdapter, features: object) -> object:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return original(self, features)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(TargetAdapter, "logits", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _text(dialogue, "main")
    assert dialogue._conversation.num_cached == 0  # the interrupted pass is not used again
    messages = [*dialogue.messages, {"role": "user", "content": "return"}]
    expected = decoder.generate(messages, max_new_tokens=12).text
    assert _text(dialogue, "return") == expected


def test_a_question_without_an_answer_is_dropped() -> None:
    tokenizer = family_tokenizer("chatml")
    every = list(range(len(tokenizer)))  # every token ends the text and is invisible
    tokenizer.add_tokens(tokenizer.convert_ids_to_tokens(every), special_tokens=True)
    model = tiny_llama(vocab=len(tokenizer))
    model.generation_config.eos_token_id = every
    decoder = SpeculativeDecoder(model, tokenizer=tokenizer)
    with closing(Dialogue(decoder, DialogueSettings())) as dialogue:
        assert _text(dialogue, "main") == ""
        assert dialogue.messages == []
        assert "ended its answer at once" in str(dialogue.notice)


def test_an_answer_ends_where_the_context_is_full(
    dialogue: Dialogue, decoder: SpeculativeDecoder
) -> None:
    context, question = decoder.target.spec.max_position, "m"
    while _num_tokens(dialogue, question) < context - 8:
        question += "m"
    assert _text(dialogue, question)
    assert dialogue.last.emitted < 12
    assert dialogue.notice == "the target's context is full; /reset starts a new chat"
    messages = list(dialogue.messages)
    with pytest.raises(PromptError, match=r"the chat has filled the target's context.*/reset"):
        _text(dialogue, "main")
    assert dialogue.messages == messages
    dialogue.execute("/reset")
    assert _text(dialogue, "main")


def _num_tokens(dialogue: Dialogue, question: str) -> int:
    message = {"role": "user", "content": question}
    apply = dialogue.tokenizer.apply_chat_template
    return len(apply([message], add_generation_prompt=True)["input_ids"])


def test_every_answer_has_random_numbers_of_its_own(decoder: SpeculativeDecoder) -> None:
    settings = DialogueSettings(max_new_tokens=12, temperature=1.5, seed=3)
    texts = []
    for _ in range(2):
        with closing(Dialogue(decoder, settings)) as dialogue:
            first = _text(dialogue, "main")
            dialogue.execute("/reset")
            texts.append((first, _text(dialogue, "main")))
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_other_commands_reply(dialogue: Dialogue) -> None:
    assert dialogue.execute("/stats") == "no answer yet"
    _text(dialogue, "main")
    last, total = dialogue.execute("/stats").splitlines()
    assert last.startswith("last answer: 12 tokens (")
    assert total.startswith("all answers: 12 tokens (")
    _text(dialogue, "main")
    assert "all answers: 24 tokens (" in dialogue.execute("/stats")
    for name in ("/help", "/reset", "/stats", "/quit"):
        assert name in dialogue.execute("/help")
    with pytest.raises(PromptError, match="there is no command /foo"):
        dialogue.execute("/foo bar")
    assert not dialogue.is_over
    dialogue.execute("/quit")
    assert dialogue.is_over
