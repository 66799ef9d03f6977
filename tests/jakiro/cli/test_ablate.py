"""`jakiro ablate`: one option takes several files, and errors name options as typed."""

import pytest
from helpers.commands import exit_code


def test_ablate_takes_several_files_after_one_option_and_names_options_as_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--base", "base", "--out", "study", "--config", "base", "study"]
    assert exit_code("ablate", *words, "--num-prompts", "1") == 2
    assert "unusable value for '--num-prompts'" in capsys.readouterr().err
