"""The public decoder: loading, text in and out, streaming, outputs, threads."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.tokenizers import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from inference import SpeculativeDecoder
from inference.autotune.setup import Pair
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.engine.context import Context
from inference.loading import load_parts
from inference.outputs import GenerateOutput
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.errors import TargetMismatch
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def drafter_path(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("models")
    model = tiny_llama(vocab=len(tokenizer))
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    record = record_target(TargetAdapter(model).spec, str(folder / "target"), tokenizer)
    torch.manual_seed(0)
    JakiroDrafter(config_for(tiny_settings(), record)).save_pretrained(folder / "drafter")
    return folder / "drafter"


def test_a_drafter_loads_the_target_and_tokenizer_it_was_made_for(drafter_path: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained(drafter_path, tree="fixed")
    output = decoder.generate("def main(", max_new_tokens=12)
    assert output.text == decoder.tokenizer.decode(output.new_token_ids)
    assert output.stats.emitted == len(output.new_token_ids) == len(output.depths) == 12


@pytest.mark.parametrize(("load", "is_warned"), [({}, True), ({"device_map": "cpu"}, False)])
def test_a_target_on_the_cpu_beside_a_gpu_is_warned_of(
    drafter_path: Path,
    load: dict[str, str],
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    load_parts(drafter_path, None, **load)
    assert ("although there is a GPU" in caplog.text) is is_warned


def test_streamed_pieces_join_to_the_text_of_a_generation(drafter_path: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained(drafter_path, tree="fixed")
    arguments = {"max_new_tokens": 40, "temperature": 1.0, "seed": 5}
    pieces = list(decoder.stream("def main(", **arguments))
    assert "".join(pieces) == decoder.generate("def main(", **arguments).text
    assert len(pieces) > 1


def test_loading_shows_no_bar(drafter_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    SpeculativeDecoder.from_pretrained(drafter_path)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_another_process_gives_the_same_text_for_a_seed(drafter_path: Path) -> None:
    program = (
        "import sys; from inference import SpeculativeDecoder; "
        "decoder = SpeculativeDecoder.from_pretrained(sys.argv[1], tree='fixed'); "
        "options = {'max_new_tokens': 24, 'temperature': 0.8, 'seed': 11}; "
        "print(decoder.generate('def main(', **options).new_token_ids)"
    )
    decoder = SpeculativeDecoder.from_pretrained(drafter_path, tree="fixed")
    options = {"max_new_tokens": 24, "temperature": 0.8}
    here = decoder.generate("def main(", **options, seed=11).new_token_ids
    assert decoder.generate("def main(", **options, seed=12).new_token_ids != here
    there = subprocess.check_output([sys.executable, "-c", program, drafter_path], text=True)
    assert there.strip() == str(here)


def test_an_abandoned_stream_frees_its_caches(
    drafter_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SpeculativeDecoder.from_pretrained(drafter_path, tree="fixed")
    contexts = []
    monkeypatch.setattr(Context, "close", lambda context: contexts.append(context))
    pieces = decoder.stream("def main(", max_new_tokens=30)
    next(pieces)
    assert not contexts
    pieces.close()
    assert len(contexts) == 1


def test_stop_strings_end_the_text(drafter_path: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained(drafter_path, tree="fixed")
    full = decoder.generate("def main(", max_new_tokens=30)
    texts = [decoder.tokenizer.decode([token]) for token in full.new_token_ids]
    chosen = next(index for index, text in enumerate(texts) if index > 2 and text.isascii())
    output = decoder.generate("def main(", max_new_tokens=30, stop_strings=[texts[chosen]])
    first = texts.index(texts[chosen])
    assert output.new_token_ids == full.new_token_ids[: first + 1]


def test_other_weights_of_the_target_are_possible_with_a_warning(
    drafter_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = JakiroDrafter.from_pretrained(drafter_path)
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer), seed=5)
    with pytest.raises(TargetMismatch, match="or allow other weights"):
        SpeculativeDecoder(model, drafter, tokenizer)
    decoder = SpeculativeDecoder(model, drafter, tokenizer, other_weights=True)
    assert "made for other weights" in caplog.text
    expected = SpeculativeDecoder(model).generate([1, 2, 3], max_new_tokens=20, temperature=0)
    output = decoder.generate([1, 2, 3], max_new_tokens=20, temperature=0)
    assert output.new_token_ids == expected.new_token_ids
    pair = Pair(drafter, partial(CombinedDrafter, second=LookupDrafter()))
    with pytest.raises(TargetMismatch, match="or allow other weights"):
        SpeculativeDecoder(model, pair, tokenizer)
    both = SpeculativeDecoder(model, pair, tokenizer, other_weights=True)
    assert both.drafter.first.target is both.target
    other = tiny_llama(vocab=len(tokenizer), hidden_size=16)
    with pytest.raises(TargetMismatch, match="hidden size differs"):
        SpeculativeDecoder(other, drafter, tokenizer, other_weights=True)


def test_another_tokenizer_is_refused_and_another_chat_template_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = tiny_tokenizer("{{ messages[0].content }}")
    model = tiny_llama(vocab=len(tokenizer))
    record = record_target(TargetAdapter(model).spec, "nowhere", tokenizer)
    drafter = JakiroDrafter(config_for(tiny_settings(), record))
    SpeculativeDecoder(model, drafter, tokenizer, tree="fixed")
    assert "chat template" not in caplog.text
    tokenizer.chat_template = "{{ messages[-1].content }}"
    SpeculativeDecoder(model, drafter, tokenizer, tree="fixed")
    assert "chat template" in caplog.text
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(TargetMismatch, match="tokenizer"):
        SpeculativeDecoder(model, drafter, tokenizer, tree="fixed")


@pytest.fixture(scope="module")
def output(tokenizer: PreTrainedTokenizerFast) -> GenerateOutput:
    model = tiny_llama(vocab=len(tokenizer))
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tokenizer)
    return decoder.generate("def main(", max_new_tokens=12)


def test_the_repr_is_one_line_with_text_and_figures(output: GenerateOutput) -> None:
    shown = repr(output)
    assert shown.startswith(f"GenerateOutput(text={output.text!r}, tokens=12, tau=")
    assert "tokens_per_second=" in shown
    assert "tensor" not in shown
    assert "\n" not in shown


def test_the_caller_of_a_stream_keeps_its_own_number() -> None:
    before = torch.get_num_threads()
    decoder = SpeculativeDecoder(tiny_llama(), threads=before + 1)
    for _ in decoder.steps([1, 2, 3], max_new_tokens=4):
        assert torch.get_num_threads() == before
