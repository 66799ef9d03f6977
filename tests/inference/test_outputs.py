"""Outputs show their text and the figures that matter, in terminals and in notebooks."""

from dataclasses import replace
from html import escape

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


def test_the_repr_of_a_long_text_is_shortened(output: GenerateOutput) -> None:
    assert len(repr(replace(output, text="word " * 1000))) < 500


def test_notebooks_show_the_whole_text_escaped(output: GenerateOutput) -> None:
    html = output._repr_html_()
    assert html is not None
    assert html.endswith(f"{escape(output.stats.summary)}</div>")
    assert "tokens from: the target itself" in html
    tokenizer = output.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("<b>1 & 2</b>")
    text = replace(output, new_token_ids=ids, depths=[0] * len(ids))._repr_html_()
    assert text is not None
    assert "&lt;b&gt;1 &amp; 2&lt;/b&gt;" in text


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = SpeculativeDecoder(tiny_llama(vocab=11)).generate([1, 2], max_new_tokens=3)
    assert repr(output).startswith("GenerateOutput(text=None, tokens=3, tau=1.00")
    assert output._repr_html_() is None
