"""A head for part of the vocabulary: its probabilities, its forms and its saved token table."""

from pathlib import Path

import pytest
import torch
from helpers.families import tiny_family
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from safetensors.torch import load_file, save_file
from torch import nn

from jakiro import JakiroDrafter
from jakiro.draft_head import DraftHead
from jakiro.errors import CheckpointError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.weights import WeightForm, allows_form

IDS = torch.tensor([1, 4, 5, 17, 40, 60])
OTHERS: tuple[WeightForm, ...] = ("packed", "bfloat16", "int8")
FORMS = [form for form in OTHERS if allows_form(nn.Linear(32, 61), form)]
FAMILIES = ["llama, tied", "phi", "cohere", "gemma2"]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_of_drafted_tokens_are_those_of_the_whole_head(family: str) -> None:
    target = TargetAdapter(tiny_family(family))
    features = torch.randn(2, 3, target.spec.hidden_size)
    if family == "phi":
        nn.init.normal_(target.head.bias)
    whole = target.logits(features)
    head = DraftHead(target, IDS)
    torch.testing.assert_close(head.logits(features), whole[..., IDS])
    assert torch.equal(DraftHead(target, None).logits(features), whole)


class _Quantized(nn.Linear):
    """A stand-in for a head whose weight is not an ordinary matrix."""


@pytest.mark.parametrize("form", ["own", *OTHERS])
@torch.no_grad()
def test_a_head_that_is_not_an_ordinary_linear_layer_computes_all_logits(form: WeightForm) -> None:
    model = tiny_llama()
    model.lm_head.__class__ = _Quantized
    target = TargetAdapter(model)
    features = torch.randn(2, 3, 32)
    for token_ids, wanted in ((IDS, IDS), (None, torch.arange(61))):
        head = DraftHead(target, token_ids, form)
        torch.testing.assert_close(head.logits(features), target.logits(features)[..., wanted])
        assert head._copy is None


@torch.no_grad()
def test_the_probabilities_of_the_draft_vocabulary_sum_to_one() -> None:
    target = TargetAdapter(tiny_llama())
    features = torch.randn(2, 3, 32)
    for token_ids, wanted in ((IDS, IDS), (None, torch.arange(61))):
        log_probs = DraftHead(target, token_ids).log_probs(features)
        assert log_probs.dtype == torch.float32
        expected = target.logits(features)[..., wanted].softmax(-1)
        torch.testing.assert_close(log_probs.exp(), expected)


def _saved(folder: Path) -> TargetAdapter:
    target = TargetAdapter(tiny_llama())
    drafter = tiny_drafter(target, tiny_settings(draft_vocab_size=len(IDS)))
    assert drafter.draft_ids is not None
    drafter.draft_ids.copy_(IDS)
    drafter.save_pretrained(folder)
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_table_of_drafted_tokens_survives_a_checkpoint(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    _saved(tmp_path)
    loaded = JakiroDrafter.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.dtype == dtype
    assert loaded.draft_ids is not None
    assert loaded.draft_ids.dtype == torch.int64
    assert torch.equal(loaded.draft_ids, IDS)


@pytest.mark.parametrize(
    "ids",
    [[1, 5, 4, 17, 40, 60], [1, 4, 4, 17, 40, 60], [1, 4, 5, 17, 40, 61]],
)
def test_a_damaged_table_is_refused(tmp_path: Path, ids: list[int]) -> None:
    _saved(tmp_path)
    _replace(tmp_path, torch.tensor(ids))
    with pytest.raises(CheckpointError, match=r"draft_ids.* is damaged.* ids from 0 to 60"):
        JakiroDrafter.from_pretrained(tmp_path)


def _replace(folder: Path, ids: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["draft_ids"]
    if ids is not None:
        weights["draft_ids"] = ids
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("form", "family"),
    [("packed", family) for family in FAMILIES]
    + [(form, "phi") for form in FORMS if form != "packed"],
)
@torch.inference_mode()
def test_logits_in_other_forms_are_close_to_those_of_the_head(
    form: WeightForm, family: str
) -> None:
    if form not in FORMS:
        pytest.skip(f"this machine does not compute with {form}")
    target = TargetAdapter(tiny_family(family))
    features = torch.randn(2, 3, 1, 2, target.spec.hidden_size)
    if family == "phi":
        nn.init.normal_(target.head.bias)
    whole = target.logits(features)
    bound = 1e-5 if form == "packed" else 0.04 * whole.abs().max().item()
    for token_ids, expected in ((IDS, whole[..., IDS]), (None, whole)):
        logits = DraftHead(target, token_ids, form).logits(features)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, atol=bound, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_changed_head_is_copied_again_in_every_form(form: WeightForm) -> None:
    model = tiny_llama()
    target = TargetAdapter(model)
    features = torch.randn(2, 3, 32)
    for token_ids in (IDS, None):
        head = DraftHead(target, token_ids, form)
        before = head.logits(features)
        model.lm_head.weight.mul_(2)
        torch.testing.assert_close(head.logits(features), 2 * before)


@torch.no_grad()
def test_the_int8_head_computes_in_half_precision_too() -> None:
    if "int8" not in FORMS:
        pytest.skip("torch lacks int8 products")
    for dtype in (torch.bfloat16, torch.float16):
        target = TargetAdapter(tiny_llama().to(dtype))
        features = torch.randn(2, 3, 32)
        logits = DraftHead(target, IDS, "int8").logits(features)
        expected = target.logits(features.to(dtype))[..., IDS].float()
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, atol=0.3, rtol=0)


@torch.no_grad()
def test_a_packed_target_is_not_packed_twice() -> None:
    if "packed" not in FORMS:
        pytest.skip("torch cannot multiply by reordered weights")
    target = TargetAdapter(tiny_llama())
    target.fuse()
    head, features = DraftHead(target, None, "packed"), torch.randn(2, 3, 32)
    assert torch.equal(head.logits(features), target.logits(features))
    assert head._copy is None


@pytest.mark.parametrize("form", ["packed", "bfloat16"])
@torch.no_grad()
def test_a_head_in_float16_cannot_be_reordered_and_keeps_its_own_form(form: WeightForm) -> None:
    target, features = TargetAdapter(tiny_llama().half()), torch.randn(2, 3, 32)
    expected = DraftHead(target, IDS).logits(features)
    assert torch.equal(DraftHead(target, IDS, form).logits(features), expected)
