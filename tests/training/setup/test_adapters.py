"""A drafter with merged adapters computes what training computed, also in decoding."""

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from helpers.drafting import assert_training_equals_drafting
from helpers.training import batch_for, tiny_run, tiny_training
from helpers.variants import VARIANTS
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from inference.decoder import SpeculativeDecoder
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from training.config import OptimizerSettings
from training.input_settings import LoraSettings
from training.loop.metrics import read_metrics
from training.loop.optimizer import build_optimizer
from training.loss.batch import Batch
from training.loss.drafting import draft_all_positions
from training.setup.adapters import adaptable, add_adapters, merged
from training.train import train

# PEFT uses a deprecated name of transformers: https://github.com/huggingface/peft
BUILDS_A_PEFT_MODEL = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
LORA = LoraSettings(rank=4, alpha=8)


def shuffled(model: nn.Module) -> None:
    """Give adapters random weights, because new adapters change nothing."""
    torch.manual_seed(5)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.05)


def outputs(tiny: Any, drafter: JakiroDrafter, batch: Batch) -> list[Tensor]:
    """Return features and log weights of each anchor sample, as training computes them."""
    reader = tiny.reader(batch.token_ids.shape[1])
    samples = list(draft_all_positions(drafter, reader.view(batch), batch, reader.tail))
    return [part for output in samples for part in (output.features, output.log_weights)]


# Drafters in `make test`, which have at least one of each layer that can have adapters.
QUICK = {
    *("E2-mixture-P2", "E2-sum-P1", "kv-subset-projected", "hidden-projected", "tail-1"),
    *("draft-vocabulary", "feedback-fused", "hybrid-mixture-P2"),
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, marks=() if name in QUICK else pytest.mark.slow, id=name)
        for name, settings in VARIANTS.items()
    ],
)
def test_a_merged_drafter_computes_what_training_computes(settings: DrafterSettings) -> None:
    tiny, batch = tiny_training(settings), batch_for(settings, (9, 11), (20,))
    names = tiny.drafter.state_dict().keys()
    before = outputs(tiny, tiny.drafter, batch)
    add_adapters(tiny.drafter, LORA)
    torch.testing.assert_close(outputs(tiny, tiny.drafter, batch), before, rtol=0, atol=0)
    shuffled(tiny.drafter)
    trained = outputs(tiny, tiny.drafter, batch)
    assert (trained[0] - before[0]).abs().max() > 0.01
    whole = merged(tiny.drafter)
    assert whole.state_dict().keys() == names
    for got, expected in zip(outputs(tiny, whole, batch), trained, strict=True):
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    whole.eval().requires_grad_(False)
    assert_training_equals_drafting(tiny.target, whole, length=7, depth=2)


def test_only_adapters_learn_and_the_router_has_none_unless_it_is_named() -> None:
    drafter = tiny_training().drafter
    linears, stacks = adaptable(drafter)
    add_adapters(drafter, LORA)
    trainable = [name for name, weight in drafter.named_parameters() if weight.requires_grad]
    assert len(trainable) == 2 * (len(linears) + len(stacks) - 1)
    assert all("lora_" in name and "router" not in name for name in trainable)
    groups = build_optimizer(drafter, OptimizerSettings()).param_groups
    assert sum(len(group["params"]) for group in groups) == len(trainable)
    other = tiny_training().drafter
    add_adapters(other, LORA.model_copy(update={"targets": ("router", "experts.down")}))
    names = [name for name, weight in other.named_parameters() if weight.requires_grad]
    assert len(names) == 4


@BUILDS_A_PEFT_MODEL
def test_a_run_with_adapters_leaves_a_merged_drafter_and_adapters_for_its_start(
    trained_workshop: Path,
) -> None:
    base = trained_workshop / "run" / "drafter"
    changes: dict[str, Any] = {
        "evaluation": {"num_prompts": 0},
        "lora": {"rank": 4, "alpha": 8},
        "initialize": {"drafter": str(base)},
        "drafter": {"experts": {"intermediate_size": 32}},
        "run_folder": str(trained_workshop / "adapted"),
    }
    settings = tiny_run(trained_workshop, steps=4, checkpoint={"every": 2}, **changes)
    folder = train(settings)
    trained = JakiroDrafter.from_pretrained(folder).state_dict()
    before = JakiroDrafter.from_pretrained(base)
    changed = {name for name, part in before.state_dict().items() if not part.equal(trained[name])}
    linears, stacks = adaptable(before)
    assert changed == {f"{name}.weight" for name in linears if "router" not in name} | {*stacks}
    found = peft.PeftModel.from_pretrained(before, settings.run_folder / "adapter")
    again = merged(found.base_model.model).state_dict()
    torch.testing.assert_close(again, trained, rtol=0, atol=1e-6)
    assert (
        SpeculativeDecoder.from_pretrained(folder, tree="fixed")
        .generate("def", max_new_tokens=4)
        .text
    )
    # The folder is changed to look as if the run had stopped after step 2.
    whole = [line for line in read_metrics(settings.run_folder) if "loss" in line]
    for lost in ("drafter", "checkpoints/step-00000004"):
        shutil.rmtree(settings.run_folder / lost)
    resumed = train(settings)
    losses = [line for line in read_metrics(settings.run_folder) if "loss" in line]
    assert [line["loss"] for line in losses] == [line["loss"] for line in whole]
    for name, part in JakiroDrafter.from_pretrained(resumed).state_dict().items():
        assert part.equal(trained[name]), name


@BUILDS_A_PEFT_MODEL
def test_a_target_with_adapters_of_its_own_is_trained_for_and_decodes(workshop: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(workshop / "target")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted: Any = peft.get_peft_model(model, config)
    shuffled(adapted)
    before = {name: part.clone() for name, part in adapted.state_dict().items()}
    tokenizer = AutoTokenizer.from_pretrained(workshop / "target")
    settings = tiny_run(workshop, steps=10, evaluation={"num_prompts": 0})
    drafter = JakiroDrafter.from_pretrained(train(settings, model=adapted, tokenizer=tokenizer))
    losses = [line["loss"] for line in read_metrics(settings.run_folder) if "loss" in line]
    assert sum(losses[-4:]) < sum(losses[:4])
    assert all(torch.equal(before[name], part) for name, part in adapted.state_dict().items())
    text = "def add_one(first"
    output = SpeculativeDecoder(adapted, drafter, tokenizer, tree="fixed").generate(
        text, max_new_tokens=8
    )
    ids = tokenizer(text, return_tensors="pt")
    expected = adapted.generate(**ids, max_new_tokens=8, do_sample=False)
    assert output.sequences.tolist() == expected.tolist()
