"""What the fingerprint of a model depends on."""

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.serving import tiny_decoder
from helpers.tokenizers import tiny_tokenizer

from inference import SpeculativeDecoder
from inference.drafters.aded import AdedDrafter
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.small_lm import SmallLMDrafter
from inference.serving.scheduling.engine_thread import EngineThread
from inference.serving.scheduling.loaded_model import LoadedModel
from jakiro.target.adapter import TargetAdapter


def _fingerprint(decoder: SpeculativeDecoder) -> str:
    with EngineThread(decoder, places=2, capacity=32) as engine:
        return LoadedModel(engine).fingerprint


def _with_drafter(seed: int) -> SpeculativeDecoder:
    """Return a decoder whose drafter has weights of a seed."""
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer))
    drafter = tiny_drafter(TargetAdapter(model))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return SpeculativeDecoder(model, drafter, tokenizer, tree="fixed")


def test_the_fingerprint_depends_on_the_drafter_and_its_weights() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer))
    small = [tiny_llama(vocab=len(tokenizer), num_hidden_layers=layers) for layers in (1, 2)]
    decoders = [
        _with_drafter(0),
        _with_drafter(1),
        tiny_decoder(),
        SpeculativeDecoder(model, None, tokenizer, tree="fixed"),
        *(
            SpeculativeDecoder(model, SmallLMDrafter(own, model), tokenizer, tree="fixed")
            for own in small
        ),
    ]
    found = list(map(_fingerprint, decoders))
    assert len(set(found)) == len(found)
    assert _fingerprint(_with_drafter(1)) == found[1]
    assert all(own.startswith("fp_") for own in found)


def test_the_fingerprint_depends_on_the_trees() -> None:
    found = set()
    for depth in (2, 3):
        tokenizer = tiny_tokenizer()
        model = tiny_llama(vocab=len(tokenizer))
        drafter = LookupDrafter(LookupSettings(depth=depth))
        decoder = SpeculativeDecoder(model, drafter, tokenizer, tree="fixed")
        found.add(_fingerprint(decoder))
    assert len(found) == 2


def test_a_line_says_whether_seeds_repeat() -> None:
    for drafter, words in ((LookupDrafter(), "same text"), (AdedDrafter(), "does not repeat")):
        decoder = tiny_decoder()
        own = SpeculativeDecoder(decoder.target.model, drafter, decoder.tokenizer, tree="fixed")
        with EngineThread(own, places=2, capacity=32) as engine:
            line = str(LoadedModel(engine, "mine"))
        assert line.startswith("mine: ")
        assert words in line


@pytest.mark.parametrize("is_invariant", [False, True])
def test_a_line_says_what_half_precision_does_to_seeds(is_invariant: bool) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer)).to(torch.bfloat16)
    decoder = SpeculativeDecoder(
        model, LookupDrafter(), tokenizer, tree="fixed", batch_invariant=is_invariant
    )
    with EngineThread(decoder, places=2, capacity=32) as engine:
        line = str(LoadedModel(engine, "mine"))
        assert engine.are_seeds_repeatable is is_invariant
    assert ("the same seed gives the same text" in line) is is_invariant
    assert ("remedy: --batch-invariant" in line) is not is_invariant


def test_the_fingerprint_depends_on_the_dtype_of_the_target() -> None:
    tokenizer = tiny_tokenizer()
    models = [
        tiny_llama(vocab=len(tokenizer)).to(dtype) for dtype in (torch.float32, torch.float64)
    ]
    first, other = (
        _fingerprint(SpeculativeDecoder(model, LookupDrafter(), tokenizer, tree="fixed"))
        for model in models
    )
    assert first != other
