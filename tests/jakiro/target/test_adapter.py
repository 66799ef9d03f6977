"""The target adapter and its cache: trees, packing and commits reproduce the model's logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import tiny_model
from helpers.models import tiny_llama
from helpers.trees import PARENTS, path_to

from inference import SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter
from jakiro.errors import TargetMismatch, TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.checks import check_reproduces
from jakiro.target.record import check_target, record_target
from jakiro.target.step import ancestor_matrix, chain_step


def test_the_ancestor_matrix_marks_exactly_the_path_to_each_node() -> None:
    matrix = ancestor_matrix(torch.tensor([PARENTS]), max_depth=4)[0]
    for query in range(len(PARENTS)):
        assert matrix[query].nonzero().flatten().tolist() == sorted(path_to(query))


@torch.no_grad()
def test_keys_and_values_are_read_from_the_cache() -> None:
    target = TargetAdapter(tiny_llama())
    cache = target.new_cache(1, 12)
    target.forward(chain_step(torch.randint(0, 61, (1, 12)), 0), cache)
    kv = cache.kv(torch.tensor([[3, 10]]), layers=(0, 2))
    layer = cache.slot_layers[2]
    assert kv.shape == (1, 2, 2, 32)
    assert torch.equal(kv[0, 1, 1, :16], layer.keys[0, :, 10].flatten())
    assert torch.equal(kv[0, 1, 1, 16:], layer.values[0, :, 10].flatten())


def test_the_fingerprint_survives_a_change_of_dtype_but_not_of_weights() -> None:
    spec = TargetAdapter(tiny_llama()).spec
    record = record_target(spec, "tiny")
    check_target(record, TargetAdapter(tiny_llama().bfloat16()).spec)
    other = TargetAdapter(tiny_llama(seed=5)).spec
    with pytest.raises(TargetMismatch, match="made for a target other than") as raised:
        check_target(record, other)
    assert "other weights" not in str(raised.value)
    with pytest.raises(TargetMismatch, match=r"or allow other weights: .* --other-weights"):
        check_target(record, other, other_weights=False)


def test_a_target_whose_siblings_see_each_other_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def everyone(parents: torch.Tensor, max_depth: int) -> torch.Tensor:
        return torch.ones(*parents.shape, parents.shape[1], dtype=torch.bool).tril()

    monkeypatch.setattr("jakiro.target.step.ancestor_matrix", everyone)
    with pytest.raises(TargetNotSupported, match="does not reproduce"):
        TargetAdapter(tiny_llama())


def test_a_target_is_tried_at_its_last_positions() -> None:
    model = tiny_llama()
    last: list[int] = []

    def note(module: object, args: object, kwargs: dict[str, Any]) -> None:
        if kwargs.get("position_ids") is not None:
            last.append(int(kwargs["position_ids"].max()))

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    spec = TargetAdapter(model).spec
    assert max(last) == spec.max_position - 2  # of the deepest node of the tree


def test_tokens_that_can_never_be_chosen_are_no_obstacle() -> None:
    model: Any = tiny_model("PhiForCausalLM")
    with torch.no_grad():
        model.lm_head.bias[50:] = float("-inf")
    ids = torch.tensor([[3, 4, 5]])
    expected = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    decoder = SpeculativeDecoder(model, LookupDrafter())
    assert decoder.generate([3, 4, 5], max_new_tokens=12).sequences.tolist() == expected.tolist()


def test_a_huge_logit_hides_no_difference_elsewhere() -> None:
    logits = torch.randn(3, 50)
    logits[:, 7] = torch.finfo(torch.float32).min
    check_reproduces(logits + 1e-5, logits, "target")
    with pytest.raises(TargetNotSupported, match="does not reproduce"):
        check_reproduces(logits + 0.1, logits, "target")


def test_relative_paths_of_targets_become_absolute_and_other_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "folder")
    spec = TargetAdapter(tiny_llama()).spec
    names = ("./folder", "latest", str(tmp_path / "folder"), "owner/model", "")
    recorded = [record_target(spec, name).name_or_path for name in names]
    folder, link = str(tmp_path / "folder"), str(tmp_path / "latest")
    assert recorded == [folder, link, folder, "owner/model", ""]
