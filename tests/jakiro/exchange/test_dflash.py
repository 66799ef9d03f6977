"""Imported block drafters draft as they were published to, and are exported again unchanged."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drafting import chain_frontier, prefilled
from helpers.imports import CLOSE, converted, imported
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.published import Weights, save_published
from helpers.published_blocks import (
    BLOCK,
    DIM,
    EPS,
    INNER,
    RANK,
    TAPS,
    THETA,
    PublishedBlock,
    as_speculators,
    block_config,
    block_weights,
    dspark_config,
)
from helpers.variants import VARIANTS

from inference.drafters.trained.drafter import TrainedDrafter
from inference.protocol import Budget
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError, ConfigError
from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.exchange.dflash import export_dflash
from jakiro.exchange.eagle3_export import ServedTarget, serve_command, write_export
from jakiro.exchange.families import plan_import
from jakiro.exchange.vllm_export import export_vllm
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.settings import merge

FACTS = ServedTarget("owner/target", "LlamaForCausalLM", 128)
WITH_TABLES, REDUCED = {"rank": RANK}, {"rank": RANK, "drafted": 23}

# Arguments of the weights, the config, and arguments of the independent forward pass.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dflash": ({}, block_config(), {}),
    "jetspec": ({}, block_config(causal_head=True), {"is_causal": True}),
    "dflash, biases": ({"has_bias": True}, block_config() | {"attention_bias": True}, {}),
    "dflash, speculators": (
        {"drafted": 23},
        as_speculators(block_config(), "dflash", draft_vocab_size=23),
        {},
    ),
    "dspark": (WITH_TABLES, dspark_config(), {"reads_anchor": True}),
    "dspark, masks": (
        WITH_TABLES,
        dspark_config(dspark_bonus_anchor=True, causal=True),
        {"is_causal": True},
    ),
    "dspark, speculators": (
        REDUCED,
        as_speculators(dspark_config(), "dspark", draft_vocab_size=23, sample_from_anchor=True),
        {"reads_anchor": True},
    ),
}


def _target() -> Any:
    return tiny_llama(num_hidden_layers=5).double()


@torch.no_grad()
def _assert_drafts_equal(drafter: JakiroDrafter, published: PublishedBlock, length: int) -> None:
    """Check the distribution of each row below a random path, and the scores of a tree."""
    target, levels = TargetAdapter(published.target), drafter.levels
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, target.spec.vocab_size, (1, length + 1), generator=generator)
    prompt, root = tokens[0, :length].tolist(), int(tokens[0, length])
    ids = torch.arange(target.spec.vocab_size) if drafter.draft_ids is None else drafter.draft_ids
    depth = sum(levels.values())
    assert depth == BLOCK - (not published.reads_anchor)
    columns = torch.randint(len(ids), (depth,), generator=generator)
    path = [root, *ids[columns].tolist()]
    chain = TrainedDrafter(drafter.eval(), target, TreeShape(**levels, breadth=1))
    source, frontier = prefilled(chain, tokens, length)[0].start_tree(), None
    expected = published.logits(prompt, path[:-1]).log_softmax(-1)
    assert len(expected) == depth
    for step in range(depth):
        got = source.joint(step + 1, frontier)[0, 0].logsumexp(0)
        assert (got - expected[step][ids]).abs().max() < CLOSE, f"row {step}"
        frontier = chain_frontier(path[step + 1])
        frontier = frontier._replace(columns=columns[step].view(1, 1))
    shape = TreeShape(**levels, children=3, breadth=2, num_nodes=12)
    session, _ = prefilled(TrainedDrafter(drafter, target, shape), tokens, length)
    tree = session.propose(Budget(12), StepRandom())
    one = tree.sequence_tree()
    for node in range(tree.num_nodes):
        nodes = [one.token_ids[index] for index in one.path(node)]
        rows = published.logits(prompt, [root, *nodes[:-1]]).log_softmax(-1)
        score = sum(float(row[token]) for row, token in zip(rows, nodes, strict=True))
        assert abs(float(tree.score[0, node]) - score) < len(nodes) * CLOSE


@pytest.mark.parametrize("name", FORMS)
def test_drafts_are_those_of_the_published_forward_pass(name: str, tmp_path: Path) -> None:
    weights_of, config, published_as = FORMS[name]
    weights, model = block_weights(**weights_of), _target()
    drafter = imported(save_published(tmp_path, weights, config), model)
    for length in (1, 9):
        _assert_drafts_equal(drafter, PublishedBlock(weights, model, **published_as), length)


@pytest.mark.parametrize("name", FORMS)
def test_every_tensor_is_accounted_for_and_an_export_has_the_same(
    name: str, tmp_path: Path
) -> None:
    weights_of, config, _ = FORMS[name]
    weights, model = block_weights(**weights_of), _target()
    folder = save_published(tmp_path / "published", weights, config)
    plan = plan_import(read_checkpoint(folder))
    used = {theirs for row in plan.table.rows for theirs in row.theirs}
    assert used | plan.table.dropped.keys() == weights.keys()
    assert all(row.startswith(("confidence", "t2d")) for row in plan.table.dropped)
    first = converted(folder, model)
    exported = export_dflash(first, FACTS)
    write_export(exported.weights, exported.config, tmp_path / "exported")
    again = converted(tmp_path / "exported", model)
    assert again.config.settings == first.config.settings
    for key, part in first.state_dict().items():
        assert torch.equal(again.state_dict()[key], part), key
    kept = {name: part for name, part in weights.items() if not name.startswith("confidence")}
    assert exported.weights.keys() == kept.keys()
    if "d2t" not in weights:  # otherwise, rows are sorted
        for key, part in kept.items():
            assert torch.equal(exported.weights[key], part), key


@pytest.mark.parametrize(("rank", "method"), [(0, "dflash"), (RANK, "dspark")])
def test_engines_find_the_keys_that_they_read(rank: int, method: str, tmp_path: Path) -> None:
    config = dspark_config() if rank else block_config(causal=True)
    drafter = converted(save_published(tmp_path, block_weights(rank=rank), config), _target())
    exported = export_dflash(drafter, FACTS).config
    own = {"intermediate_size": INNER, "head_dim": DIM, "rms_norm_eps": EPS, "rope_theta": THETA}
    own |= {"block_size": BLOCK, "max_position_embeddings": 128, "num_target_layers": 5}
    assert {key: exported[key] for key in own} == own
    block = {"target_layer_ids": [tap - 1 for tap in TAPS], "mask_token_id": 7}
    block |= {"causal": not rank, "causal_head": not rank}
    assert exported["dflash_config"] == block
    schedule = drafter.config.settings.schedule
    command = serve_command("dflash", "my drafter", "owner/target", schedule)
    options = json.loads(shlex.split(command)[-1])
    assert options == {
        "method": method,
        "model": "my drafter",
        "num_speculative_tokens": BLOCK - (not rank),
    }


def _proposal(count: int) -> dict[str, Any]:
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": count}]}}


@pytest.mark.parametrize(
    ("kind", "rank", "changes", "reads_anchor"),
    [
        ("dflash", 0, {}, False),
        ("dspark", RANK, {}, True),
        ("dspark", RANK, _proposal(BLOCK - 1), False),
        ("dspark", RANK, _proposal(BLOCK), True),
        ("dflash", 0, {"sample_from_anchor": True}, True),
    ],
)
def test_the_config_says_whether_the_row_of_the_last_token_drafts(
    kind: str, rank: int, changes: dict[str, Any], reads_anchor: bool, tmp_path: Path
) -> None:
    config = as_speculators(block_config(), kind, **changes)
    folder = save_published(tmp_path, block_weights(rank=rank), config)
    settings = plan_import(read_checkpoint(folder)).settings
    assert settings.trunk.block.predicts_from == ("all" if reads_anchor else "masks")
    assert settings.schedule.depth == BLOCK - (not reads_anchor)


def _refused(tmp_path: Path, weights: Weights, config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as error:
        plan_import(read_checkpoint(save_published(tmp_path, weights, config)))
    return str(error.value)


SLIDING = {"layer_types": ["full_attention", "sliding_attention"]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (block_config() | SLIDING, "a sliding window"),
        (block_config() | {"layer_types": None, "use_sliding_window": True}, "a sliding window"),
        (block_config(output_multiplier=0.2), "output_multiplier"),
        (block_config(target_layer_ids=[2, 1, 3]), "ascending"),
        (block_config(target_layer_ids=[1, 2]), "fc.weight for 2 states"),
        (block_config(mask_token_id=61), "mask_token_id of 0 to 60"),
        (block_config() | {"block_size": 32}, "block_size of 3 to 16"),
        (block_config() | {"draft_vocab_size": 23}, "d2t"),
        (block_config() | {"target_hidden_size": 64}, "as wide as its target"),
        (block_config(projector_type="other"), "projector_type"),
        (block_config() | {"num_hidden_layers": 1}, "only tensors of this architecture"),
        (dspark_config(markov_head_type="gated"), "markov_head_type"),
    ],
)
def test_what_a_block_cannot_express_is_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in _refused(tmp_path, block_weights(), config)


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, (), "DFlash2"),
        ({}, ("candidate_selector.hidden_projection.weight",), "DFlash2"),
        ({"architectures": ["LiLiCorrDraftModel"]}, (), "LiLiCorr"),
        ({"dflash_config": {"projector_type": "domino"}}, (), "Domino"),
        ({"architectures": ["Qwen3NextMTP"]}, (), "MTP head"),
        ({}, ("mtp.fc.weight",), "MTP head"),
        ({"architectures": ["LlamaForCausalLMEagle4"]}, (), "EAGLE-4"),
        ({"speculators_model_type": "peagle"}, (), "P-EAGLE"),
        ({"parallel_drafting": True}, (), "P-EAGLE"),
    ],
)
def test_other_drafters_are_refused_by_their_names(
    changes: dict[str, Any], tensors: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    weights = block_weights() | {name: torch.ones(2, 2) for name in tensors}
    assert message in _refused(tmp_path, weights, block_config() | changes)


def test_taps_must_be_below_the_last_hidden_state_of_the_target(tmp_path: Path) -> None:
    plan = plan_import(read_checkpoint(save_published(tmp_path, block_weights(), block_config())))
    (settings,) = plan.candidates(5)
    assert settings.memory.layers == TAPS
    with pytest.raises(CheckpointError, match="hidden states below the last one"):
        plan.candidates(4)


OWN_BLOCK = VARIANTS["block-dflash"]


def _own_block(changes: dict[str, Any]) -> JakiroDrafter:
    own = {"memory": {"layer_attention": False, "layers": (1, 3), "output_bias": False}}
    values = merge(merge(OWN_BLOCK.model_dump(), own), changes)
    target = TargetAdapter(tiny_llama(num_hidden_layers=4))
    return tiny_drafter(target, type(OWN_BLOCK)(**values))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": {"output_bias": True}}, "memory.output_bias of False"),
        ({"memory": {"layers": (3, 1)}}, "ascending drafter.memory.layers from 1 to 3"),
        ({"memory": {"layers": (1, 4)}}, "ascending drafter.memory.layers"),
        ({"trunk": {"block": {"mask_token": None}}}, "mask_token of a token"),
        ({"trunk": {"block": {"predicts_from": "all"}}}, "predicts_from of masks"),
        ({"trunk": {"block": {"reads_feature": True}}}, "reads_feature of False"),
        ({"trunk": {"qk_norm": False}}, "qk_norm of True"),
        ({"experts": {"num_experts": 2}}, "num_experts of 1"),
        ({"experts": {"head": "own"}}, "experts.head of own with a draft_vocab_size"),
        ({"schedule": {"path": "embedding"}}, "schedule.path of none"),
        ({"schedule": {"path": "recurrent"}}, "schedule.path of none"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_the_setting(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        export_dflash(_own_block(changes), FACTS)


def test_an_export_names_the_hidden_states_that_are_read_by_default() -> None:
    exported = export_dflash(_own_block({"memory": {"layers": None}}), FACTS)
    states = [index + 1 for index in exported.config["dflash_config"]["target_layer_ids"]]
    assert exported.weights["fc.weight"].shape[1] == len(states) * exported.config["hidden_size"]
    assert states == [1, 2, 3]


def test_an_own_block_drafts_as_the_published_architecture_does(tmp_path: Path) -> None:
    model = _target()
    trunk = {
        "kind": "block",
        "block": {"reads_feature": False, "predicts_from": "masks", "mask_token": 7},
        "qk_norm": True,
        "num_layers": 2,
        "head_dim": DIM,
        "rope_theta": THETA,
    }
    settings = tiny_settings(
        1,
        parallel_levels=BLOCK - 2,
        autoregressive_levels=1,
        trunk=trunk,
        parallel_heads="masks",
        output_norm="head",
        norm_eps=EPS,
        source="hidden",
        layers=TAPS,
        layer_attention=False,
        output_bias=False,
    )
    drafter = tiny_drafter(TargetAdapter(model), settings).double()
    drafter.level_masks.tokens.copy_(model.get_input_embeddings().weight[[7]])
    weights = export_dflash(drafter, FACTS).weights
    _assert_drafts_equal(drafter, PublishedBlock(weights, model), 6)
    with pytest.raises(ConfigError, match="a block drafter cannot be exported"):
        export_vllm(drafter, TargetAdapter(model))
