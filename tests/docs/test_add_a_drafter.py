"""The drafter on the page about adding a drafter is lossless."""

import re
from pathlib import Path
from typing import Any

from helpers.losslessness import greedy_by_transformers
from helpers.models import tiny_llama

PAGE = (Path(__file__).parents[2] / "docs/developer/add-a-drafter.md").read_text()
[CODE] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_drafter_of_the_page_is_lossless(tmp_path: Path) -> None:
    tiny_llama(vocab=11).save_pretrained(tmp_path)
    names: dict[str, Any] = {"target_path": str(tmp_path)}
    exec(CODE, names)
    expected = greedy_by_transformers(names["model"], names["prompt"], 32)
    assert names["output"].sequences[0].tolist() == expected
