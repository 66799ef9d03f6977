"""Published drafters are read without running code; every tensor is accounted for."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.published import eagle_config, eagle_weights, save_published

from jakiro.errors import CheckpointError
from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.exchange.families import plan_import

GATE, QUERY = "layers.0.mlp.gate_proj.weight", "layers.0.self_attn.q_proj.weight"


class Malicious:
    """An object whose unpickling writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    folder = save_published(tmp_path / "head", eagle_weights(), eagle_config(), "bin")
    torch.save({"fc.weight": torch.ones(2), "other": Malicious(ran)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot read a published drafter"):
        read_checkpoint(folder)
    assert not ran.exists()


@pytest.mark.parametrize("layout", ["safetensors", "bin"])
def test_truncated_files_are_refused(layout: str, tmp_path: Path) -> None:
    folder = save_published(tmp_path, eagle_weights(), eagle_config(), layout)
    (file,) = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"cannot read a published drafter from .*download"):
        read_checkpoint(folder)


def test_a_drafter_of_the_package_is_found_and_a_missing_one_is_explained() -> None:
    assert read_checkpoint("smollm2-135m-instruct").config["model_type"] == "jakiro"
    for name in ("nobody/nothing", "./missing"):
        with pytest.raises(CheckpointError, match="no such folder, no such model in the cache"):
            read_checkpoint(name)


def test_origin_and_checksums_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "abc123"
    save_published(folder, eagle_weights(), eagle_config())
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A head\n")
    checkpoint = read_checkpoint(folder)
    assert (checkpoint.revision, checkpoint.licence) == ("abc123", "mit")
    data = (folder / "model.safetensors").read_bytes()
    assert checkpoint.checksums()["model.safetensors"] == hashlib.sha256(data).hexdigest()
    assert checkpoint.checksums().keys() == {"config.json", "model.safetensors"}
    other = read_checkpoint(save_published(tmp_path / "head", eagle_weights(), eagle_config()))
    assert (other.revision, other.licence) == (None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({GATE: None}, f"a tensor {GATE}; got: none"),
        ({QUERY: torch.zeros(32, 32, 2)}, QUERY),
        ({"fc.bias": torch.zeros(32, 2)}, "fc.bias"),
        ({"layers.1.mlp.gate_proj.weight": torch.zeros(3)}, "1 others: layers.1.mlp"),
        ({GATE: torch.zeros(24, 32).to(torch.float8_e4m3fn)}, "numbers of 16, 32 or 64 bits in"),
        ({"fc.bias": torch.full((32,), torch.nan)}, r"infinite numbers in fc\.bias"),
    ],
)
def test_a_tensor_that_cannot_be_used_is_named(
    changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    weights = {k: v for k, v in (eagle_weights() | changes).items() if v is not None}
    folder = save_published(tmp_path, weights, eagle_config())
    with pytest.raises(CheckpointError, match=message):
        plan_import(read_checkpoint(folder)).table.converted()
