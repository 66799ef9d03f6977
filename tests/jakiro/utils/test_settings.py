"""Settings are frozen, strict and layered, and their errors state plainly what is wrong."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, model_validator

from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings, dump_settings, load_settings, validate_settings


class Optimizer(Settings):
    learning_rate: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)


class Stage(Settings):
    num_steps: int = 1
    save: bool | int = False


class Recipe(Settings):
    name: str = "nameless"
    optimizer: Optimizer = Optimizer()
    warmup: Optimizer | None = None
    stages: tuple[Stage, ...] = ()
    folder: Path | None = None

    @model_validator(mode="after")
    def _forbid_the_forbidden(self) -> "Recipe":
        if self.name == "forbidden":
            raise ValueError("any other name")
        return self


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def test_values_come_from_the_file_and_the_rest_from_defaults(write: Any) -> None:
    path = write("recipe.yaml", "name: mine\noptimizer: {learning_rate: 1e-4}\n")
    recipe = load_settings(Recipe, path)
    assert recipe == Recipe(name="mine", optimizer=Optimizer(learning_rate=1e-4))


def test_mappings_merge_along_extends_and_other_values_are_replaced(write: Any) -> None:
    write("shared/base.yaml", "name: base\noptimizer: {learning_rate: 0.5, betas: [0.1, 0.2]}\n")
    write("shared/middle.yaml", "extends: base.yaml\nstages: [{num_steps: 1}, {num_steps: 2}]\n")
    path = write(
        "top.yaml",
        "extends: shared/middle.yaml\noptimizer: {betas: [0.3, 0.4]}\nstages: [{num_steps: 7}]\n",
    )
    assert load_settings(Recipe, path) == Recipe(
        name="base",
        optimizer=Optimizer(learning_rate=0.5, betas=(0.3, 0.4)),
        stages=(Stage(num_steps=7),),
    )


def test_overrides_come_last_and_in_order(write: Any) -> None:
    path = write("recipe.yaml", "optimizer: {learning_rate: 0.5}\n")
    overrides = ["optimizer.learning_rate=1e-2", "name=a=b", "stages=[{num_steps: 3}]", "name=last"]
    recipe = load_settings(Recipe, path, overrides)
    assert (recipe.name, recipe.stages) == ("last", (Stage(num_steps=3),))
    assert recipe.optimizer == Optimizer(learning_rate=0.01)


@settings(max_examples=25)
@given(
    st.builds(
        Recipe,
        name=st.text().filter(lambda name: name != "forbidden"),
        optimizer=st.builds(
            Optimizer,
            learning_rate=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
            betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
        ),
        warmup=st.none() | st.just(Optimizer()),
        stages=st.lists(st.builds(Stage, num_steps=st.integers())).map(tuple),
        folder=st.none() | st.just(Path("some/folder")),
    )
)
def test_dumped_settings_are_read_back_as_equal(
    tmp_path_factory: pytest.TempPathFactory, recipe: Recipe
) -> None:
    path = tmp_path_factory.mktemp("dumped") / "config.yaml"
    path.write_text(dump_settings(recipe), encoding="utf-8")
    assert load_settings(Recipe, path) == recipe


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("nmae: x", "did you mean 'name'"),
        ("optimizer: {learning_rte: 1}", "did you mean 'optimizer.learning_rate'"),
        ("warmup: {beta: [1, 2]}", "did you mean 'warmup.betas'"),
        ("stages: [{num_stpes: 1}]", "did you mean 'stages.num_steps'"),
        ("entirely_different: 1", "remove the key"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(
    write: Any, text: str, suggestion: str
) -> None:
    with pytest.raises(ConfigError, match=f"unknown key .*expected: one of .*{suggestion}"):
        load_settings(Recipe, write("recipe.yaml", text))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("optimizer: {learning_rate: -1}", r"'optimizer.learning_rate'.*greater than 0.*got: -1"),
        ("stages: [{num_steps: many}]", r"'stages.0.num_steps'.*integer.*got: 'many'"),
        ("name: 1\nfolder: {}", r"'name' \(and 1 more\)"),
        ("name: forbidden", "do not fit together; expected: any other name"),
        ("- a list", "contains no settings.*got: list"),
        ("name: [", "is not YAML"),
        ("name: one\nname: two", "'name' is repeated here"),
        ("extends: missing.yaml", r"cannot read the settings file .*missing\.yaml"),
    ],
)
def test_a_bad_file_is_refused_with_what_was_expected(
    write: Any, text: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){complaint}"):
        load_settings(Recipe, write("recipe.yaml", text))


@pytest.mark.parametrize("override", ["name", "=1", "optimizer..betas=1", "name=[", ""])
def test_a_malformed_override_is_refused(write: Any, override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        load_settings(Recipe, write("recipe.yaml", ""), [override])


def test_values_that_are_not_from_a_file_are_validated_in_the_same_way() -> None:
    assert validate_settings(Recipe, {"name": "mine"}, source="here") == Recipe(name="mine")
    with pytest.raises(ConfigError, match="here has the unknown key 'nam'"):
        validate_settings(Recipe, {"nam": "mine"}, source="here")
