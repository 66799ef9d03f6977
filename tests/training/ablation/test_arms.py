"""Arms change only permitted settings, are equally large, and can all be trained."""

from pathlib import Path

import pytest
from helpers.training import tiny_run

from jakiro.errors import ConfigError
from jakiro.target.attention_shape import AttentionShape
from jakiro.target.record import TargetRecord
from jakiro.utils.settings import dump_settings
from training.ablation.arms import (
    TOLERANCE,
    equalize_sizes,
    num_active_parameters,
    read_arms,
)
from training.loop.metrics import read_metrics
from training.setup.preparation import prepare
from training.train import train

CONFIGS = Path(__file__).parents[3] / "configs"
ABLATIONS = sorted((CONFIGS / "ablations").glob("*.yaml"))
# Ablations that add what `drafters/jakiro.yaml` has to the defaults; the others change that file.
ADDED = {"experts-2", "contrast-loss", "experts-2-contrast-loss"}
WHOLE = CONFIGS / "drafters" / "jakiro.yaml"
DRAFTERS = sorted((CONFIGS / "drafters").glob("*.yaml"))
REQUIRED = ["target.name_or_path=any", "data.paths=[any.jsonl]"]
TARGET = TargetRecord(
    name_or_path="any",
    hidden_size=256,
    vocab_size=4096,
    kv_widths=(256,) * 12,
    fingerprint="any",
    num_hidden_states=13,
    attention=AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, rope_theta=10_000.0),
)


@pytest.fixture
def base(workshop: Path) -> Path:
    """Return a base config for two steps, with the heads of the target's layers."""
    path = workshop / "base.yaml"
    trunk = {"kind": "hybrid", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    drafter = {"trunk": trunk, "experts": {"intermediate_size": 256}}
    start = {"attention_layer": "auto"}
    settings = tiny_run(
        workshop, steps=2, drafter=drafter, initialize=start, evaluation={"num_prompts": 0}
    )
    path.write_text(dump_settings(settings))
    return path


def _delta(folder: Path, text: str, name: str = "delta") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


# Ablations that are trained in `make test`, one for each mechanism. The sizes of all ablations are
# tested below, and the losses, anchors and initializations of the others in tests/training/loss and
# tests/training/setup.
QUICK = {"curriculum", "experts-8-sparse-1", "tail-1"}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.slow, id=path.stem)
        for path in ABLATIONS
    ],
)
def test_every_ablation_is_as_large_as_the_base_and_takes_two_steps(path: Path, base: Path) -> None:
    without = ["drafter.experts.num_experts=1", "objective.contrast_weight=0"]
    arms = read_arms(base, [path], without if path.stem in ADDED else [])
    inputs = prepare(arms[0].settings)
    reference, arm = equalize_sizes(arms, inputs.drafter_config.target_record)
    active = num_active_parameters(arm.settings.drafter, inputs.drafter_config.target_record)
    assert active == pytest.approx(reference.parameters, rel=TOLERANCE)
    train(arm.settings, model=inputs.target.model, tokenizer=inputs.tokenizer)
    losses = [line["loss"] for line in read_metrics(arm.settings.run_folder) if "loss" in line]
    assert len(losses) == 2


def test_all_other_ablations_of_the_repository_together_fit_its_whole_drafter() -> None:
    paths = [path for path in ABLATIONS if path.stem not in ADDED]
    arms = equalize_sizes(read_arms(WHOLE, paths, REQUIRED), TARGET)
    assert len({arm.name for arm in arms}) == len(paths) + 1
    changed = [arm for arm in arms[1:] if arm.settings == arms[0].settings]
    assert changed == []
    widths = {arm.name: arm.width for arm in arms}
    assert widths["experts-1"] == 2 * widths["base"] == 4 * widths["experts-4"]
    assert widths["contrast-loss-off"] == widths["base"]
    assert widths["experts-8-sparse-1"] == pytest.approx(widths["experts-1"], rel=0.01)
    assert widths["experts-16-sparse-2"] == pytest.approx(widths["base"], rel=0.01)


def test_arms_are_as_large_as_the_base_with_the_draft_vocabulary_of_the_data(
    workshop: Path,
) -> None:
    size = 299  # more tokens than the texts contain
    drafter = {"experts": {"intermediate_size": 64, "head": "own"}, "draft_vocab_size": size}
    (workshop / "base.yaml").write_text(dump_settings(tiny_run(workshop, drafter=drafter)))
    (workshop / "delta.yaml").write_text("drafter: {experts: {head: target}}")
    arms = read_arms(workshop / "base.yaml", [workshop / "delta.yaml"])
    inputs = prepare(arms[0].settings)
    config = inputs.drafter_config
    assert config.draft_vocab_size is not None
    assert config.draft_vocab_size < size
    sized = equalize_sizes(arms, config.target_record, base_config=config)
    assert [own.settings.drafter.draft_vocab_size for own in sized] == [size, size]
    trained = [prepare(own.settings).build_drafter() for own in sized]
    counts = [sum(part.numel() for part in one.parameters()) for one in trained]
    assert [own.parameters for own in sized] == counts
    assert counts[1] == pytest.approx(counts[0], rel=TOLERANCE)


def test_all_drafters_of_the_repository_but_two_are_equally_large_in_a_study() -> None:
    # Gumiho's five joining matrices and second layer alone are larger than the base's drafter, and
    # Hidden Transfer has no experts.
    drafters = [path for path in DRAFTERS if path.stem not in ("gumiho", "hidden-transfer")]
    arms = equalize_sizes(read_arms(CONFIGS / "study.yaml", drafters, REQUIRED), TARGET)
    assert len(arms) == len(drafters) + 1
    for name in ("gumiho", "hidden-transfer"):
        arm = read_arms(CONFIGS / "study.yaml", [CONFIGS / f"drafters/{name}.yaml"], REQUIRED)
        with pytest.raises(ConfigError, match=f"arm {name} cannot be made as large as the base"):
            equalize_sizes(arm, TARGET)
        base, own = equalize_sizes(arm, TARGET, any_size=True)
        assert own.width == base.width == own.width_before
        assert own.parameters != pytest.approx(base.parameters, rel=TOLERANCE)


def test_arms_share_overrides_and_are_cut_to_the_same_steps(base: Path, workshop: Path) -> None:
    delta = _delta(workshop, "objective: {contrast_weight: 0}")
    arms = read_arms(base, [delta], ["seed=5", "steps=9"], max_steps=4)
    assert {(arm.settings.seed, arm.settings.steps) for arm in arms} == {(5, 4)}
    assert [arm.settings.objective.contrast_weight for arm in arms] == [0.1, 0.0]
    (short, _) = read_arms(base, [delta], max_steps=1)
    assert short.settings.optimizer.warmup_steps == 1
    (cut, _) = read_arms(base, [delta], ["steps=null", "epochs=3"], max_steps=4)
    assert (cut.settings.steps, cut.settings.epochs) == (4, 3)


@pytest.mark.parametrize(
    "text",
    [
        "seed: 3",
        "steps: 10",
        "data: {sequence_length: 16}",
        "batch: {global_batch_size: 2}",
        "optimizer: {learning_rate: 0.1}",
        "drafter: {experts: {intermediate_size: 8, num_experts: 1}}",
        "",
    ],
)
def test_a_delta_that_changes_what_arms_share_is_refused(
    base: Path, workshop: Path, text: str
) -> None:
    with pytest.raises(ConfigError, match="cannot be compared with the base"):
        read_arms(base, [_delta(workshop, text)])
