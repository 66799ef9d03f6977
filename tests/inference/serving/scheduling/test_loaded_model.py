"""What the fingerprint of a model depends on."""

import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.serving import tiny_decoder
from helpers.tokenizers import tiny_tokenizer

from inference import SpeculativeDecoder
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
