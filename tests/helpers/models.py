"""Tiny random targets and drafters, built in milliseconds."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import (
    DrafterSettings,
    ExpertsSettings,
    MemorySettings,
    ScheduleSettings,
    TrunkSettings,
)
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target


def tiny_llama(vocab: int = 61, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """Return a random Llama; its output distributions are far from uniform."""
    torch.manual_seed(seed)
    fields = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        **changes,
    }
    return LlamaForCausalLM(LlamaConfig(**fields)).eval()


def tiny_settings(
    num_experts: int = 2,
    combine: str = "mixture",
    parallel_levels: int = 1,
    contrastive_head: bool = True,
    autoregressive_levels: int = 2,
    trunk: dict[str, object] | None = None,
    tail_layers: int = 0,
    draft_vocab_size: int | None = None,
    norm_eps: float = 1e-6,
    output_norm: str = "none",
    head: str = "target",
    active_experts: int | None = None,
    parallel_heads: str = "experts",
    path: str = "none",
    path_rank: int | None = None,
    **memory: object,
) -> DrafterSettings:
    """Return the settings of a drafter with some ten thousand parameters."""
    is_feedback = (trunk or {}).get("kind") == "feedback"
    sizes = {"num_heads": 2, "head_dim": 8, "mlp_width": 16}
    return DrafterSettings(
        trunk=TrunkSettings(
            **{"kind": "moa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **(trunk or {})}
        ),
        memory=MemorySettings() if is_feedback else MemorySettings(**sizes, **memory),
        tail_layers=tail_layers,
        draft_vocab_size=draft_vocab_size,
        norm_eps=norm_eps,
        experts=ExpertsSettings(
            num_experts=num_experts,
            intermediate_size=24,
            combine=combine,
            contrastive_head=contrastive_head,
            output_norm=output_norm,
            head=head,
            active_experts=active_experts,
        ),
        schedule=ScheduleSettings(
            autoregressive_levels=autoregressive_levels,
            parallel_levels=parallel_levels,
            parallel_heads=parallel_heads,
            path=path,
            path_rank=path_rank,
        ),
    )


def tiny_drafter(
    target: TargetAdapter, settings: DrafterSettings | None = None, seed: int = 1
) -> JakiroDrafter:
    """Return a random drafter for a target."""
    torch.manual_seed(seed)
    record = record_target(target.spec, "tiny")
    drafter = JakiroDrafter(config_for(settings or tiny_settings(), record)).eval()
    if drafter.experts.beta is not None:  # its start value 0 would leave the contrast untested
        torch.nn.init.constant_(drafter.experts.beta, 0.7)
    if drafter.path_features is not None:  # neither would matrices of zeros show anything
        for weight in drafter.path_features.shifts.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    if drafter.level_masks is not None and not drafter.level_masks.tokens.requires_grad:
        torch.nn.init.normal_(drafter.level_masks.tokens)
    return drafter
