"""Without a target, a model with random weights is profiled, on random prompts."""

from inference.profiling.subject import (
    PROMPT_TOKENS,
    PromptSettings,
    load_drafter,
    load_prompts,
    load_target,
)
from jakiro.target.adapter import TargetAdapter


def test_the_default_target_drafter_and_prompts_are_random_and_always_the_same() -> None:
    settings = PromptSettings(count=3, prompt_tokens=8, new_tokens=4)
    targets = [TargetAdapter(load_target(settings)) for _ in range(2)]
    assert [target.model.name_or_path for target in targets] == ["", ""]
    prompts, same = (load_prompts(settings, target) for target in targets)
    assert prompts == same
    assert [len(prompt) for prompt in prompts] == [PROMPT_TOKENS] * 3
    weights, others = (next(load_drafter(None, target).parameters()) for target in targets)
    assert weights.equal(others)
    parts = zip(*(target.model.parameters() for target in targets), strict=True)
    assert all(part.equal(other) for part, other in parts)
