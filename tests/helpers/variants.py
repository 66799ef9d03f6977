"""Settings of tiny drafters of every kind."""

from helpers.models import tiny_settings

FEEDBACK = {"kind": "feedback"}
HYBRID = {"kind": "hybrid"}
NO_FIRST = {"first_position": False}
PUBLISHED = FEEDBACK | {"input_norms": False}
FUSED = FEEDBACK | {"fusion_layers": (0, 2, 3)}
EAGLE = PUBLISHED | NO_FIRST | {"attention_norm": False}

BRANCH = {"parallel_heads": "branch"}
MASKS = {"parallel_heads": "masks"}
PATH = {"path": "embedding"}
BLOCK = MASKS | {"source": "hidden", "autoregressive_levels": 1, "parallel_levels": 3}
LAYERS = {"num_layers": 2}
NO_LAYER = {"num_layers": 0}
TRANSFER = FEEDBACK | NO_LAYER | {"input": "wide", "input_norms": False, "attention_norm": False}
TRIGRAM = {"tokens": "trigram"}

WIDE = FUSED | NO_FIRST | {"input": "wide", "attention_norm": False, "input_bias": False}
OWN = {"head": "own", "output_norm": "head"}

# At least one drafter of each kind.
VARIANTS = {
    "E2-mixture-P1": tiny_settings(),
    "E2-mixture-P2": tiny_settings(parallel_levels=2),
    "E2-sum-P1": tiny_settings(combine="sum"),
    "E4-sum-P2-no-contrast": tiny_settings(
        num_experts=4, combine="sum", parallel_levels=2, contrastive_head=False
    ),
    "E8-1-active": tiny_settings(8, active_experts=1),
    "E16-2-active-P2": tiny_settings(16, parallel_levels=2, active_experts=2, trunk=HYBRID),
    "E8-2-active-sum": tiny_settings(8, "sum", active_experts=2),
    "E1-P1": tiny_settings(num_experts=1),
    "kv-subset-projected": tiny_settings(layers=(0, 2), common_width=12),
    "hidden": tiny_settings(source="hidden"),
    "last-feature": tiny_settings(source="hidden", layer_attention=False),
    "layer-input": tiny_settings(
        source="hidden", layers=(-2,), layer_attention=False, trunk=HYBRID
    ),
    "hidden-unordered": tiny_settings(source="hidden", layers=(3, 1), layer_attention=False),
    "hidden-projected": tiny_settings(source="hidden", layers=(0, 2), common_width=12),
    "kv-not-rotated": tiny_settings(rotated=False, trunk=HYBRID),
    "kv-side-by-side": tiny_settings(layers=(2, 0), layer_attention=False),
    "tail-1": tiny_settings(combine="sum", parallel_levels=0, tail_layers=1),
    "tail-2-E1": tiny_settings(1, "sum", parallel_levels=0, tail_layers=2),
    "feedback-tail-1": tiny_settings(
        combine="sum", parallel_levels=0, tail_layers=1, trunk=FEEDBACK
    ),
    "hybrid-tail-1": tiny_settings(combine="sum", parallel_levels=0, tail_layers=1, trunk=HYBRID),
    "draft-vocabulary": tiny_settings(draft_vocab_size=23, parallel_levels=2),
    "feedback-E1-P0": tiny_settings(1, parallel_levels=0, trunk=FEEDBACK),
    "feedback-sum-P1": tiny_settings(combine="sum", trunk=PUBLISHED),
    "feedback-mixture-P2": tiny_settings(parallel_levels=2, trunk=FEEDBACK),
    "feedback-fused": tiny_settings(trunk=FUSED),
    "hybrid-mixture-P2": tiny_settings(parallel_levels=2, trunk=HYBRID),
    "moa-no-first": tiny_settings(trunk=NO_FIRST),
    "feedback-no-first": tiny_settings(combine="sum", trunk=FEEDBACK | NO_FIRST),
    "hybrid-tail-1-no-first": tiny_settings(
        combine="sum", parallel_levels=0, tail_layers=1, trunk=HYBRID | NO_FIRST
    ),
    "eagle": tiny_settings(1, "sum", parallel_levels=0, trunk=EAGLE, norm_eps=1e-3),
    "eagle-qwen2": tiny_settings(
        1, "sum", parallel_levels=0, trunk=EAGLE | {"attention_bias": "qkv", "input_bias": False}
    ),
    "published": tiny_settings(combine="sum", trunk=EAGLE, norm_eps=1e-3),
    "eagle3": tiny_settings(1, "sum", 0, trunk=WIDE, draft_vocab_size=23, **OWN),
    "eagle3.1": tiny_settings(
        1,
        "sum",
        0,
        trunk=WIDE | {"residual": "normed", "fusion_norm": "each", "qk_norm": True},
        head="own",
        output_norm="feedback",
    ),
    "hybrid-wide-own-head-P1": tiny_settings(
        trunk=HYBRID | {"input": "wide", "attention_norm": False}, draft_vocab_size=23, **OWN
    ),
    "chimera": tiny_settings(1, parallel_levels=2, trunk=FEEDBACK | TRIGRAM),
    "moa-trigram-no-first": tiny_settings(trunk=NO_FIRST | TRIGRAM),
    "hybrid-trigram-tail-1": tiny_settings(
        combine="sum", parallel_levels=0, tail_layers=1, trunk=HYBRID | TRIGRAM
    ),
    "branch-heads": tiny_settings(1, parallel_levels=5, trunk=FEEDBACK, **BRANCH),
    "hybrid-branch-heads": tiny_settings(
        parallel_levels=2, trunk=HYBRID | TRIGRAM, output_norm="head", **BRANCH
    ),
    "gumiho": tiny_settings(1, parallel_levels=5, trunk=FEEDBACK | LAYERS, **BRANCH),
    "parallel-spec": tiny_settings(
        1, parallel_levels=3, autoregressive_levels=1, trunk=FEEDBACK, **MASKS
    ),
    "masks-E2": tiny_settings(parallel_levels=3, trunk=FEEDBACK, **MASKS),
    "hybrid-masks-two-layers-no-first": tiny_settings(
        4, "sum", 2, trunk=HYBRID | LAYERS | NO_FIRST, draft_vocab_size=23, **MASKS
    ),
    "tensor": tiny_settings(
        4, parallel_levels=3, autoregressive_levels=1, trunk=FEEDBACK | NO_LAYER
    ),
    "medusa": tiny_settings(1, parallel_levels=3, trunk=TRANSFER),
    "hidden-transfer": tiny_settings(
        1,
        "sum",
        3,
        autoregressive_levels=1,
        trunk=TRANSFER,
        tail_layers=2,
        parallel_heads="transfer",
    ),
    "hybrid-no-layer": tiny_settings(parallel_levels=2, trunk=HYBRID | NO_LAYER | TRIGRAM),
    "moa-three-layers": tiny_settings(trunk={"num_layers": 3}),
    "hybrid-two-layers-no-first": tiny_settings(trunk=HYBRID | LAYERS | NO_FIRST | TRIGRAM),
    "wide-two-layers-tail-1": tiny_settings(
        combine="sum", parallel_levels=0, tail_layers=1, trunk=WIDE | LAYERS
    ),
    "hybrid-long-context": tiny_settings(
        trunk=HYBRID
        | {"rope": {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}
    ),
    "moa-feed-forward": tiny_settings(trunk={"mlp_width": 20}, rope_theta=50.0),
    "hybrid-feed-forward-tail-1": tiny_settings(
        combine="sum", parallel_levels=0, tail_layers=1, trunk=HYBRID | {"mlp_width": 20}
    ),
    "moa-output-norm": tiny_settings(output_norm="head", trunk={"qk_norm": True}),
    "fused-norm-all": tiny_settings(trunk=FUSED | {"fusion_norm": "all"}, output_norm="feedback"),
    "hybrid-unnormed-biased": tiny_settings(
        trunk=HYBRID | {"attention_norm": False, "attention_bias": "all"}, norm_eps=1e-3
    ),
    "block": tiny_settings(1, trunk={"kind": "block"} | LAYERS, **BLOCK | PATH),
    "block-causal-E2": tiny_settings(
        trunk={"kind": "block", "block": {"causal": True}} | LAYERS, **BLOCK, draft_vocab_size=23
    ),
    "block-dflash": tiny_settings(
        1,
        trunk={
            "kind": "block",
            "block": {"reads_feature": False, "predicts_from": "masks", "mask_token": 5},
            "qk_norm": True,
        }
        | LAYERS,
        output_norm="head",
        **BLOCK,
    ),
    "block-dspark": tiny_settings(
        1,
        trunk={"kind": "block", "block": {"reads_feature": False}},
        draft_vocab_size=23,
        path_rank=5,
        **BLOCK | {"path": "tables"},
    ),
    "block-mixture-E2": tiny_settings(
        layers=(1, 2, 3),
        mixture="per_layer",
        layer_attention=False,
        trunk={"kind": "block"} | LAYERS | FUSED | {"kind": "block"},
        **BLOCK | PATH,
    ),
    "block-kv-E4-sum": tiny_settings(
        4, "sum", trunk={"kind": "block"}, **BLOCK | PATH | {"source": "kv"}
    ),
    "block-recurrent": tiny_settings(
        trunk={"kind": "block"} | LAYERS, draft_vocab_size=23, **BLOCK | {"path": "recurrent"}
    ),
    "masks-recurrent": tiny_settings(
        parallel_levels=2, trunk=HYBRID, **MASKS | {"path": "recurrent"}
    ),
    "masks-path": tiny_settings(parallel_levels=3, trunk=FEEDBACK, **MASKS | PATH),
    "moa-path-E4-few-tokens": tiny_settings(4, parallel_levels=2, draft_vocab_size=23, **PATH),
    "gumiho-path": tiny_settings(1, parallel_levels=5, trunk=FEEDBACK | LAYERS, **BRANCH | PATH),
    "hybrid-sum-hidden-fused": tiny_settings(
        combine="sum", trunk=HYBRID | {"fusion_layers": (0, 2)}, source="hidden", layers=(3, 1)
    ),
}


_TRUNKS = {"moa": {}, "feedback": FEEDBACK, "hybrid": HYBRID}
# Kind of trunk, experts, their combination, parallel levels, contrast, size of the vocabulary.
_COMBINATIONS: tuple[tuple[str, int, str, int, bool, int | None], ...] = (
    ("moa", 1, "sum", 0, True, None),
    ("moa", 2, "mixture", 3, False, 23),
    ("moa", 4, "mixture", 1, True, None),
    ("moa", 4, "sum", 2, False, 23),
    ("feedback", 1, "mixture", 2, True, 23),
    ("feedback", 2, "sum", 1, False, None),
    ("feedback", 4, "sum", 3, True, None),
    ("feedback", 4, "mixture", 0, True, 23),
    ("hybrid", 1, "mixture", 3, True, None),
    ("hybrid", 2, "mixture", 0, True, None),
    ("hybrid", 2, "sum", 2, True, 23),
    ("hybrid", 4, "sum", 1, False, 23),
)
# More drafters, in which settings that interact are combined in other ways.
GRID = VARIANTS | {
    f"{trunk}-E{experts}-{combine}-P{parallel}": tiny_settings(
        experts, combine, parallel, contrast, draft_vocab_size=size, trunk=_TRUNKS[trunk]
    )
    for trunk, experts, combine, parallel, contrast, size in _COMBINATIONS
}
GRID |= {
    f"tail-{tail}-E{experts}-{source}": tiny_settings(
        experts, "sum", 0, tail_layers=tail, source=source, draft_vocab_size=size
    )
    for tail, experts, source, size in (
        *((1, 4, "kv", 23), (2, 1, "hidden", None), (1, 2, "hidden", None), (2, 4, "kv", None)),
    )
}
