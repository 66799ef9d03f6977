"""A drafter that is overfitted to one document drafts it without mistakes."""

import pytest
import torch
from helpers.models import tiny_llama, tiny_settings
from helpers.training import TinyTraining, one_document, tiny_training
from helpers.variants import (
    BRANCH,
    FEEDBACK,
    FUSED,
    HYBRID,
    LAYERS,
    MASKS,
    NO_LAYER,
    PATH,
    PUBLISHED,
    TRANSFER,
    TRIGRAM,
    VARIANTS,
)
from torch import Tensor

from inference import SpeculativeDecoder
from inference.trees.shape import TreeShape
from jakiro.drafter_settings import DrafterSettings
from training.loss.anchors import AnchorRule
from training.loss.batch import Batch
from training.loss.settings import ObjectiveSettings
from training.module import TrainingModule

LENGTH = 30
PROMPT = 4
LEVELS = 2

MOA = tiny_settings()
ROLLED_OUT = tiny_settings(trunk=FEEDBACK | {"ttt_steps": LEVELS})
VARIETY = {
    "tail-1": tiny_settings(combine="sum", parallel_levels=0, tail_layers=1),
    "tail-2": tiny_settings(combine="sum", parallel_levels=0, tail_layers=2),
    "draft-vocabulary": tiny_settings(draft_vocab_size=30),
    "sum": tiny_settings(combine="sum"),
    "P0": tiny_settings(parallel_levels=0),
    "E4-P2": tiny_settings(4, parallel_levels=2),
    "P3": tiny_settings(parallel_levels=3),
    "hybrid": tiny_settings(trunk=HYBRID | {"ttt_steps": LEVELS}),
    "published": tiny_settings(combine="sum", trunk=PUBLISHED | {"ttt_steps": LEVELS}),
    "fused": tiny_settings(trunk=FUSED | {"ttt_steps": LEVELS}),
    "curriculum": tiny_settings(),
    "gumiho": tiny_settings(
        1, parallel_levels=5, trunk=FEEDBACK | LAYERS | {"ttt_steps": LEVELS}, **BRANCH
    ),
    "parallel-spec": tiny_settings(
        parallel_levels=3, trunk=FEEDBACK | {"ttt_steps": LEVELS}, **MASKS
    ),
    "hidden-transfer": tiny_settings(
        1,
        "sum",
        autoregressive_levels=1,
        trunk=TRANSFER,
        tail_layers=2,
        parallel_heads="transfer",
    ),
    "tensor": tiny_settings(4, trunk=FEEDBACK | NO_LAYER),
    "chimera": tiny_settings(1, trunk=FEEDBACK | TRIGRAM | {"ttt_steps": LEVELS}),
    "block": VARIANTS["block"],
    "block-mixture-E2": VARIANTS["block-mixture-E2"],
    "block-recurrent": VARIANTS["block-recurrent"].model_copy(update={"draft_vocab_size": 30}),
    "masks-path": tiny_settings(
        parallel_levels=3, trunk=FEEDBACK | {"ttt_steps": LEVELS}, **MASKS | PATH
    ),
}


def levels_of(settings: DrafterSettings) -> int:
    """Return the number of autoregressive levels to learn.

    Hidden Transfer has a single matrix for a level, and no other weights to learn a second level. A
    block has one pass.
    """
    is_one = settings.schedule.parallel_heads == "transfer" or settings.trunk.is_block
    return 1 if is_one else LEVELS


def anchors_of(settings: DrafterSettings, step: int) -> Tensor:
    """Return the anchors that training samples for the only sequence, [samples, length]."""
    kind, samples = "drafting", 2
    if settings.trunk.reads_features:
        kind, samples = "ttt", levels_of(settings)
    elif settings.tail_layers:
        kind = "blocks"
    starts = torch.zeros(LENGTH, dtype=torch.long).numpy()
    return torch.from_numpy(AnchorRule(kind, LEVELS, samples).anchors(starts, (0, step)))


def learn(tiny: TinyTraining, tokens: Tensor, steps: int, num_narrow: int) -> None:
    """Overfit to one document, with a narrow view in the first `num_narrow` steps."""
    if tiny.drafter.draft_ids is not None:
        rest = [token for token in range(61) if token not in tokens[0].tolist()]
        missing = len(tiny.drafter.draft_ids) - len(tokens[0].unique())
        ids = [*tokens[0].unique().tolist(), *rest[:missing]]
        tiny.drafter.draft_ids.copy_(torch.tensor(sorted(ids)))
    settings, reader = tiny.drafter.config.settings, tiny.reader(LENGTH)
    # Token losses say little about the state that tail layers read, so feature losses are added.
    weights = {"token": 1, "feature": settings.tail_layers, "contrast": 0, "balance": 0}
    terms = {f"{name}_weight": weight for name, weight in weights.items()}
    module = TrainingModule(tiny.drafter, ObjectiveSettings(**terms))
    view = reader.view(one_document(tokens, anchors_of(settings, 0)))
    optimizer = torch.optim.Adam(tiny.drafter.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for step in range(steps):
        batch = one_document(tokens, anchors_of(settings, step))
        batch = Batch(**(vars(batch) | {"is_narrow": torch.tensor([step < num_narrow])}))
        optimizer.zero_grad()
        module(view, batch, reader).total.div(LENGTH).backward()
        torch.nn.utils.clip_grad_norm_(tiny.drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def assert_drafts_without_a_mistake(
    settings: DrafterSettings, steps: int, num_narrow: int = 0
) -> None:
    model = tiny_llama()
    prompt = torch.tensor([[3, 1, 4, 1]])
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=LENGTH - PROMPT,
        pad_token_id=0,
    )
    tiny = tiny_training(settings)
    learn(tiny, tokens, steps, num_narrow)
    parallel = settings.schedule.parallel_levels
    chain = {"children": 1, "breadth": 1}
    levels = levels_of(settings)
    shape = TreeShape(autoregressive_levels=levels, parallel_levels=parallel, **chain)
    decoder = SpeculativeDecoder(model, tiny.drafter, tree=shape)
    output = decoder.generate(prompt[0].tolist(), max_new_tokens=LENGTH - PROMPT)
    assert output.sequences.tolist() == tokens.tolist()
    # The prefill emits the first token; the last step may draft more tokens than are left.
    longest = shape.depth + 1
    emitted, steps = output.stats.emitted - 1, output.stats.target_forwards
    last = emitted % longest or longest
    assert (emitted - last) / (steps - 1) >= 0.95 * longest


@pytest.mark.parametrize("settings", [MOA, ROLLED_OUT], ids=["moa", "feedback"])
def test_one_document_is_learnt_by_heart(settings: DrafterSettings) -> None:
    assert_drafts_without_a_mistake(settings, steps=80)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIETY)
def test_every_kind_of_drafter_learns_one_document_by_heart(name: str) -> None:
    steps = 400 if name in ("tail-2", "hidden-transfer") else 200
    # Narrow views are only for the first steps: in decoding, self-attention sees all tokens.
    num_narrow = steps // 2 if name == "curriculum" else 0
    assert_drafts_without_a_mistake(VARIETY[name], steps, num_narrow)
