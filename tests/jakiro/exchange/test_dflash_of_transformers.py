"""Chains of an imported block drafter are accepted as those of transformers' own DFlash."""

from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers.imports import converted
from helpers.models import tiny_llama
from helpers.published import HIDDEN, INNER, greedy_texts, save_published
from helpers.published_blocks import (
    BLOCK,
    DIM,
    EPS,
    HEADS,
    KV_HEADS,
    MASK,
    TAPS,
    THETA,
    block_config,
    block_weights,
    fit_block,
)
from transformers.generation import candidate_generator
from transformers.generation import utils as generation_utils

from inference.decoder import SpeculativeDecoder
from inference.trees.shape import TreeShape
from jakiro.exchange.dflash import export_dflash
from jakiro.exchange.eagle3_export import ServedTarget
from jakiro.target.adapter import TargetAdapter

assistants = pytest.importorskip("transformers.models.muse_glimmer_assistant")
FACTS = ServedTarget("owner/target", "LlamaForCausalLM", 128)


class _Recorded(candidate_generator.DFlashTokenCandidateGenerator):
    """Keeps the number of accepted tokens of each decoding step."""

    accepted: ClassVar[list[int]] = []

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: Any) -> None:
        super().update_candidate_strategy(input_ids, scores, num_matches)
        self.accepted.append(int(num_matches))


def test_chains_are_accepted_as_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(num_hidden_layers=5)
    prompts = torch.randint(0, 61, (6, 5), generator=torch.Generator().manual_seed(2))
    texts = greedy_texts(model, prompts, 32)
    drafter = converted(save_published(tmp_path, block_weights(), block_config()), model)
    fit_block(drafter, TargetAdapter(model), texts)
    config = assistants.MuseGlimmerAssistantConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        layer_types=["full_attention"] * 2,
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=[tap - 1 for tap in TAPS],
    )
    renamed = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}
    assistant = assistants.MuseGlimmerAssistantModel(config).eval()
    assistant.load_state_dict(
        {
            f"{renamed.get(start, start)}.{rest}": part
            for name, part in export_dflash(drafter, FACTS).weights.items()
            for start, _, rest in [name.partition(".")]
        }
    )
    monkeypatch.setattr(generation_utils, "DFlashTokenCandidateGenerator", _Recorded)
    shape = TreeShape(**drafter.levels, children=1, breadth=1, num_nodes=BLOCK - 1)
    decoder = SpeculativeDecoder(model, drafter, None, shape)
    total = 0
    for prompt in prompts.tolist():
        _Recorded.accepted.clear()
        options = {"do_sample": False, "pad_token_id": 0, "speculation_type": "dflash"}
        ids = torch.tensor([prompt])
        options |= {"attention_mask": torch.ones_like(ids), "assistant_model": assistant}
        expected = model.generate(ids, max_new_tokens=32, **options)[0, 5:].tolist()
        output = decoder.generate(prompt, temperature=0.0, max_new_tokens=32)
        assert output.new_token_ids == expected
        ends = [index for index, depth in enumerate(output.depths) if not depth]
        accepted = [after - end - 1 for end, after in pairwise([-1, *ends])]
        # The text ends within the last step, whose drafts the two count differently.
        steps = _Recorded.accepted[: len(accepted) - 1]
        assert accepted[: len(steps)] == steps
        assert len(_Recorded.accepted) - len(accepted) in (0, 1)
        total += sum(steps)
    assert total > 40
