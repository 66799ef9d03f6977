"""Drafters can be trained for targets of any geometry, and decoding with them is lossless."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.drafting import assert_training_equals_drafting
from helpers.families import tiny_model
from helpers.tokenizers import tiny_tokenizer
from helpers.training import batch_for
from torch import nn
from transformers import PreTrainedModel

from inference import SpeculativeDecoder
from inference.draft_tree import DraftTree
from inference.engine.context import Context
from inference.trees.shape import TreeShape
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target
from jakiro.utils.settings import merge
from training.config import OptimizerSettings
from training.loop.optimizer import build_optimizer
from training.loss.settings import ObjectiveSettings
from training.module import TargetReader, TrainingModule

VOCAB = 61
TREE = TreeShape(children=4, breadth=3, num_nodes=12)
PROMPT = [3, 4, 5]
NEW_TOKENS = 10


@dataclass(frozen=True)
class Geometry:
    """The target's configuration, and the drafter's settings that differ from `WHOLE`."""

    fields: dict[str, Any]
    drafter: dict[str, Any]


def _heads(queries: int, rows: int, hidden: int = 32, **fields: Any) -> dict[str, Any]:
    heads = {"num_attention_heads": queries, "num_key_value_heads": rows}
    return {"hidden_size": hidden, **heads, **fields}


# A drafter with all parts.
WHOLE = {
    "trunk": {"kind": "hybrid"},
    "experts": {"num_experts": 2, "intermediate_size": 512},
    "schedule": {"autoregressive_levels": 2, "parallel_levels": 1},
}
COMMON = {"memory": {"common_width": 24}}
HIDDEN = {"memory": {"source": "hidden"}}
GEOMETRIES = {
    "28 query and 4 key/value heads, hidden states": Geometry(_heads(28, 4, hidden=56), HIDDEN),
    "24 key/value heads, one for each query head": Geometry(_heads(24, 24, hidden=48), {}),
    "wide heads": Geometry(_heads(4, 2, head_dim=12), {}),
    "one key/value head for all, common width": Geometry(_heads(4, 1), COMMON),
    "tied embeddings": Geometry(_heads(4, 2, tie_word_embeddings=True), {}),
    "one layer": Geometry(_heads(4, 2, num_hidden_layers=1), {}),
    "a padded vocabulary": Geometry(_heads(4, 2, vocab_size=64), {}),
}


def _drafter(target: TargetAdapter, **changes: Any) -> JakiroDrafter:
    """Return a drafter with all parts, with `changes`, whatever the target's heads."""
    torch.manual_seed(1)
    settings = DrafterSettings.model_validate(merge(WHOLE, changes))
    return JakiroDrafter(config_for(settings, record_target(target.spec, "tiny")))


def _steps(drafter: JakiroDrafter, target: TargetAdapter) -> Iterator[list[torch.Tensor]]:
    """Take two optimizer steps and yield the gradients of each step."""
    module = TrainingModule(drafter, ObjectiveSettings(feature_weight=0.1, contrast_weight=0.1))
    optimizer = build_optimizer(module, OptimizerSettings())
    reader = TargetReader(target, drafter, 24, torch.float32)
    for seed in range(2):
        batch = batch_for(drafter.config.settings, [10, 11], [24], seed=seed)
        optimizer.zero_grad()
        terms = module(reader.view(batch), batch, reader)
        (terms.total / terms.num_positions).backward()
        yield [part.grad for part in drafter.parameters() if part.grad is not None]
        optimizer.step()


def _trained(target: TargetAdapter, **changes: Any) -> JakiroDrafter:
    drafter = _drafter(target, **changes)
    for gradients in _steps(drafter, target):
        assert len(gradients) == len(list(drafter.parameters()))
        assert all(part.isfinite().all() for part in gradients)
        assert all(part.any() for part in gradients)
    assert all(part.grad is None for part in target.model.parameters())
    return drafter.eval()


def _llama(**fields: Any) -> PreTrainedModel:
    return tiny_model("LlamaForCausalLM", **{"vocab_size": VOCAB, **fields}).requires_grad_(False)


def _greedy(model: Any, **arguments: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    return model.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, **arguments
    )[0].tolist()


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_drafter_with_other_heads_than_its_target_trains_and_decodes(name: str) -> None:
    geometry = GEOMETRIES[name]
    model = _llama(**geometry.fields)
    target = TargetAdapter(model)
    drafter = _trained(target, **geometry.drafter)

    with torch.no_grad():
        assert_training_equals_drafting(target, drafter, length=7, depth=3)

    decoder = SpeculativeDecoder(model, drafter, tree=TREE)
    output = decoder.generate(PROMPT, max_new_tokens=NEW_TOKENS)
    assert output.sequences[0].tolist() == _greedy(model)
    assert decoder.generate(PROMPT, temperature=1.0, seed=0, max_new_tokens=9).new_token_ids


PADDING = [61, 62, 63]  # ids beyond the vocabulary of the tokenizer


def _padded_phi(bias: float) -> Any:
    """Return a model whose head never or always prefers padding, depending on `bias`."""
    model: Any = tiny_model("PhiForCausalLM", vocab_size=64).requires_grad_(False)
    model.lm_head.bias[PADDING] = bias
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_padding_are_rejected_where_the_request_forbids_it(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _padded_phi(bias=30.0)  # the drafter has the same head
    decoder = SpeculativeDecoder(model, _trained(TargetAdapter(model)), tree=TREE)
    drafted: set[int] = set()
    original = Context.propose

    def noted(self: Context, *arguments: Any) -> DraftTree:
        tree = original(self, *arguments)
        drafted.update(tree.token_ids.flatten().tolist())
        return tree

    monkeypatch.setattr(Context, "propose", noted)
    forbidden = {"suppress_tokens": PADDING, "max_new_tokens": NEW_TOKENS}
    output = decoder.generate(PROMPT, temperature=temperature, seed=0, **forbidden)
    assert drafted & set(PADDING)
    assert not set(output.new_token_ids) & set(PADDING)
    if temperature == 0.0:
        assert output.sequences[0].tolist() == _greedy(model, suppress_tokens=PADDING)


def test_a_vocabulary_padded_by_resizing_decodes_to_text() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model("LlamaForCausalLM", vocab_size=len(tokenizer))
    model.resize_token_embeddings(pad_to_multiple_of=64, mean_resizing=False)
    target = TargetAdapter(model.requires_grad_(False))
    assert target.spec.vocab_size == 320 > len(tokenizer)
    decoder = SpeculativeDecoder(model, _trained(target), tokenizer, tree=TREE)
    for temperature in (0.0, 5.0):  # at temperature 5, padding is sampled
        request = {"temperature": temperature, "seed": 0, "max_new_tokens": 24}
        output = decoder.generate("def main", **request)
        assert "".join(decoder.stream("def main", **request)) == output.text
    assert max(output.new_token_ids) >= len(tokenizer)


def test_decoding_is_lossless_if_the_target_has_more_embeddings_than_logits() -> None:
    model: Any = _llama()
    model.model.embed_tokens = nn.Embedding(64, 32).requires_grad_(False)
    decoder = SpeculativeDecoder(model, _trained(TargetAdapter(model)), tree=TREE)
    output = decoder.generate(PROMPT, max_new_tokens=NEW_TOKENS)
    assert output.sequences[0].tolist() == _greedy(model)
