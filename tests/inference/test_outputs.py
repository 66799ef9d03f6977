"""Outputs show their text and the figures that matter, in terminals and in notebooks."""

import pytest
from helpers.models import tiny_drafter, tiny_llama
from helpers.tokenizers import tiny_tokenizer

from inference import SpeculativeDecoder
from inference.outputs import GenerateOutput
from jakiro.target.adapter import TargetAdapter


@pytest.fixture(scope="module")
def output() -> GenerateOutput:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer))
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tokenizer)
    return decoder.generate("def main(", max_new_tokens=12)


def test_the_repr_is_one_line_with_text_and_figures(output: GenerateOutput) -> None:
    shown = repr(output)
    assert shown.startswith(f"GenerateOutput(text={output.text!r}, tokens=12, tau=")
    assert "tokens_per_second=" in shown
    assert "tensor" not in shown
    assert "\n" not in shown


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = SpeculativeDecoder(tiny_llama(vocab=11)).generate([1, 2], max_new_tokens=3)
    assert repr(output).startswith("GenerateOutput(text=None, tokens=3, tau=1.00")
