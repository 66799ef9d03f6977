"""An imported drafter is compared with its target before it is built."""

from pathlib import Path

import pytest
import torch
from helpers.families import tiny_family
from helpers.imports import converted, imported
from helpers.models import tiny_llama
from helpers.published import eagle_config, eagle_weights, save_published

from jakiro.errors import TargetMismatch, TargetNotSupported


@pytest.mark.parametrize("changes", [{"vocab": 62}, {"hidden_size": 64}])
def test_a_target_of_another_size_is_refused(changes: dict[str, int], tmp_path: Path) -> None:
    folder = save_published(tmp_path, eagle_weights(), eagle_config())
    with pytest.raises(TargetMismatch, match=r"size differs.*as --target"):
        imported(folder, tiny_llama(**changes))


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_tuned_copy_of_the_targets_matrices_is_refused(name: str, tmp_path: Path) -> None:
    model = tiny_llama()
    matrix = dict(model.named_parameters())["lm_head.weight" if "head" in name else f"model.{name}"]
    tuned = matrix.detach().clone()
    tuned[5, 3] += 0.25
    folder = save_published(tmp_path, eagle_weights() | {name: tuned}, eagle_config())
    with pytest.raises(TargetMismatch, match=rf"{name} in .*differs.*of up to 0\.25"):
        imported(folder, model)


@pytest.mark.parametrize("family", ["gemma3", "granite"])
def test_a_target_that_scales_embeddings_or_logits_is_refused(family: str, tmp_path: Path) -> None:
    model = tiny_family(family)
    config = model.config.get_text_config()
    folder = save_published(
        tmp_path,
        eagle_weights(),
        eagle_config(vocab_size=config.vocab_size, hidden_size=config.hidden_size),
    )
    assert config.hidden_size == 32
    with pytest.raises(TargetNotSupported, match="scales its embeddings or logits"):
        imported(folder, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtype_of_the_weights_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = {name: part.to(dtype) for name, part in eagle_weights().items()}
    folder = save_published(tmp_path / "head", weights, eagle_config())
    drafter = converted(folder, tiny_llama())
    assert {part.dtype for part in drafter.parameters()} == {dtype}
    drafter.save_pretrained(tmp_path / "drafter")
    loaded = type(drafter).from_pretrained(tmp_path / "drafter")
    for name, part in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], part)
