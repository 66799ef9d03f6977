"""Targets that round like `generate()`: the bits of each token are those of transformers' steps."""

from typing import Any

import pytest
import torch
from helpers.families import FAMILIES, MECHANISMS, tiny_family
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from inference import Conversation, SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter
from inference.losslessness.check import check_greedy
from inference.losslessness.records import GreedyDifference
from inference.protocol import Drafter
from inference.trees.shape import TreeShape
from jakiro.errors import ConfigError, TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.attention import LIKE_GENERATE, like_generate_attention
from jakiro.target.batch_invariance import example
from jakiro.target.checks import FULL
from jakiro.target.like_generate import check_like_generate, generated_logits

DTYPES = (torch.bfloat16, torch.float16)
PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]


def _wide() -> PreTrainedModel:
    """Return a model in which some products have more than 1,024 inputs."""
    sizes = {"hidden_size": 64, "intermediate_size": 1536, "max_position_embeddings": 1024}
    return tiny_llama(vocab=61, num_attention_heads=4, num_key_value_heads=2, **sizes)


def _decoder(model: PreTrainedModel, kind: str) -> SpeculativeDecoder:
    drafter: Drafter | Any = None
    if kind == "lookup":
        drafter = LookupDrafter()
    elif kind == "trained":
        drafter = tiny_drafter(TargetAdapter(model))
    shape: Any = TreeShape(num_nodes=8) if kind == "trained" else "fixed"
    return SpeculativeDecoder(model, drafter, tree=shape, like_generate=True)


def _generated(model: PreTrainedModel, prompt: list[int], count: int = 40) -> list[int]:
    ids = torch.tensor([prompt])
    found: Any = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in MECHANISMS else pytest.mark.slow)
        for name in FAMILIES
        if not name.startswith("mixtral")  # its experts depend on rounding already
    ],
)
def test_a_family_has_the_bits_of_its_own_steps_or_is_refused(name: str) -> None:
    target = TargetAdapter(tiny_family(name).bfloat16())
    reason = _reason(name, target)
    if reason is not None:
        with pytest.raises(TargetNotSupported, match=reason):
            target.make_like_generate()
    else:
        target.make_like_generate()
        _check(target)


def _check(target: TargetAdapter) -> None:
    check_like_generate(target, generated_logits(target, *example(target)))


def _reason(name: str, target: TargetAdapter) -> str | None:
    """Return a part of the message with which a family is refused; None if it is not."""
    if set(target.spec.layer_kinds) != {FULL}:
        return r"layers with (sliding|chunked)_attention"
    reasons = {
        "gptj": "attn_implementation='eager'",
        "gpt2": "a matrix in Conv1D",
        "falcon": "a matrix in FalconLinear",
        "qwen3_moe": "a matrix in Qwen3Moe",
        "deepseek_v3": "a matrix in DeepseekV3",
    }
    return reasons.get(name)


def test_single_precision_is_refused() -> None:
    with pytest.raises(TargetNotSupported, match="got: float32"):
        TargetAdapter(_wide()).make_like_generate()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["none", "lookup", "trained"])
def test_greedy_text_is_that_of_generate(dtype: torch.dtype, kind: str) -> None:
    model = _wide().to(dtype)
    decoder = _decoder(model, kind)
    outputs = []
    for prompt in (PROMPT, [3], [4, 4]):
        outputs.append(decoder.generate(prompt, max_new_tokens=40, temperature=0))
        assert outputs[-1].new_token_ids == _generated(model, prompt)
    assert kind != "lookup" or sum(sum(own.stats.accepted.values()) for own in outputs) > 0


@pytest.mark.parametrize("kind", ["lookup", "trained"])
def test_logits_are_those_of_generate(kind: str) -> None:
    model = _wide().bfloat16()
    decoder = _decoder(model, kind)
    output = decoder.generate(PROMPT, max_new_tokens=30, temperature=0, output_logits=True)
    ids = torch.tensor([PROMPT])
    found: Any = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=30,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert output.logits is not None
    assert len(output.logits) == len(found.logits) == 30
    for own, other in zip(output.logits, found.logits, strict=True):
        assert torch.equal(own.flatten(), other.flatten())


def test_prompts_of_a_batch_are_read_one_by_one() -> None:
    model = _wide().bfloat16()
    decoder = _decoder(model, "lookup")
    prompts = [PROMPT, [3], [1 + index % 50 for index in range(200)], [4, 4]]
    outputs = decoder.generate_batch(prompts, max_new_tokens=24, temperature=0)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.new_token_ids == _generated(model, prompt, 24)


@pytest.mark.parametrize(("asked", "expected"), [("auto", None), (1, 1), (None, None)])
def test_the_number_of_threads_is_torchs_unless_it_is_given(asked: Any, expected: Any) -> None:
    decoder = SpeculativeDecoder(_wide().bfloat16(), like_generate=True, threads=asked)
    assert decoder.compute.threads == expected


def test_prompts_may_have_hidden_states() -> None:
    model = _wide().bfloat16()
    settings = tiny_settings(trunk={"kind": "feedback", "fusion_layers": (0, 1)})
    drafter = tiny_drafter(TargetAdapter(model), settings)
    decoder = SpeculativeDecoder(model, drafter, tree=TreeShape(num_nodes=8), like_generate=True)
    prompts = [PROMPT, PROMPT[:5]]
    outputs = decoder.generate_batch(prompts, max_new_tokens=24, temperature=0)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.new_token_ids == _generated(model, prompt, 24)


def _widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each later step adds its number of tokens."""
    own, widths = TargetAdapter.forward, list[int]()

    def forward(self: TargetAdapter, step: Any, cache: Any) -> Any:
        widths.append(step.token_ids.shape[1])
        return own(self, step, cache)

    monkeypatch.setattr(TargetAdapter, "forward", forward)
    return widths


def test_a_long_prompt_is_read_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _wide().bfloat16()
    decoder, widths = _decoder(model, "lookup"), _widths(monkeypatch)
    prompt = [1 + index % 50 for index in range(700)]
    output = decoder.generate(prompt, max_new_tokens=20, temperature=0)
    assert widths[0] == 700
    assert output.new_token_ids == _generated(model, prompt, 20)


def test_later_turns_of_a_conversation_are_read_from_the_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _wide().bfloat16()
    decoder = SpeculativeDecoder(model, LookupDrafter(), tree="fixed", like_generate=True)
    widths = _widths(monkeypatch)
    with Conversation() as conversation:
        options: dict[str, Any] = {"temperature": 0, "conversation": conversation}
        first = decoder.generate(PROMPT, max_new_tokens=12, **options)
        longer = [*PROMPT, *first.new_token_ids, 3, 4, 5]
        second = decoder.generate(longer, max_new_tokens=24, **options)
    assert second.new_token_ids == _generated(model, longer, 24)
    assert len(longer) in widths


class _OtherRows(nn.Linear):
    """A product that is different if there are several rows."""

    def forward(self, x: Tensor) -> Tensor:
        product = super().forward(x)
        return product * 1.01 if x.numel() > x.shape[-1] else product


def test_the_check_notices_attention_to_other_keys() -> None:
    def other(*arguments: Any, **options: Any) -> Any:
        attended, _ = like_generate_attention(*arguments, **options)
        return attended * 1.01, None

    target = TargetAdapter(_wide().bfloat16())
    target.make_like_generate()
    AttentionInterface.register(LIKE_GENERATE, other)
    try:
        with pytest.raises(TargetNotSupported, match="different logits of single tokens"):
            _check(target)
    finally:
        AttentionInterface.register(LIKE_GENERATE, like_generate_attention)
    _check(target)


def test_the_check_notices_products_of_several_rows() -> None:
    target = TargetAdapter(_wide().bfloat16())
    target.make_like_generate()
    target.modules.output = _OtherRows(64, 61, bias=False).bfloat16()
    target.modules.output.weight = target.model.get_output_embeddings().weight
    with pytest.raises(TargetNotSupported, match="different logits of a tree"):
        _check(target)


@pytest.mark.parametrize("other", ["packed", "compiled", "batch_invariant", "captured"])
def test_other_kernels_cannot_be_chosen_at_the_same_time(other: str) -> None:
    chosen: dict[str, Any] = {other: True}
    with pytest.raises(ConfigError, match="cannot be combined"):
        SpeculativeDecoder(_wide().bfloat16(), like_generate=True, **chosen)


def test_the_mode_excludes_others_later_as_well() -> None:
    target = TargetAdapter(_wide().bfloat16())
    target.make_like_generate()
    with pytest.raises(TargetNotSupported, match="without the rounding of generate"):
        target.modules.pack()
    with pytest.raises(TargetNotSupported, match="cannot be compiled"):
        target.compile()


def test_weights_are_not_reordered_where_that_is_left_open() -> None:
    decoder = SpeculativeDecoder(_wide().bfloat16(), like_generate=True, packed="auto")
    assert decoder.target.modules.form == "own weights, rounding of generate()"


def test_the_modules_follow_a_replaced_weight() -> None:
    model = _wide().bfloat16()
    decoder = SpeculativeDecoder(model, LookupDrafter(), tree="fixed", like_generate=True)
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(-layer.weight.detach())
    output = decoder.generate(PROMPT, max_new_tokens=20, temperature=0)
    assert output.new_token_ids == _generated(model, PROMPT, 20)


def test_texts_that_differ_are_never_explained_by_rounding() -> None:
    model = _wide().bfloat16()
    decoder = SpeculativeDecoder(model, LookupDrafter(), tree="fixed", like_generate=True)
    report = check_greedy(decoder, [PROMPT], 12)
    assert report.passed
    assert report.same_as_target == report.prompts == 1
    tie = GreedyDifference(
        prompt=1, position=3, target_token=4, decoder_token=5, gap=0.0, rounding=0.1
    )
    assert tie.is_near_tie
    assert not report.model_copy(update={"differences": (tie,)}).passed
