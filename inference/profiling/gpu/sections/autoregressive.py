"""Autoregressive decoding: milliseconds per token; the fastest arm is the baseline."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from inference.benchmark.timing import Work, repeated
from inference.engine.pipeline import PipelinePool
from inference.profiling.gpu.arms import TimedArm, measured_rows
from inference.profiling.gpu.document import Row, SectionResult
from inference.profiling.gpu.graphs import WARM_UP, captured, compiled
from inference.profiling.gpu.workbench import Workbench
from jakiro.target.cache_argument import cache_argument

PREFILL_CHUNK = 1024  # number of prompt tokens per forward pass
CAPTURED = "transformers static cache captured"
ON_CPU = "on a CPU, nothing is compiled or captured"

Builder = Callable[[Workbench, list[list[int]]], TimedArm]


class StaticDecoding:
    """Sequences of equal length that are decoded together, one token at a time.

    The masks are passed to the model, so that neither the model nor the cache determines them on
    the host.

    Args:
        model: target.
        prompts: token ids of the prompts.
        capacity: number of slots of the cache, for prompts and new tokens.
        compile_forward: function that compiles the model's `forward`; None to leave it as it is.
            Prompts are not read by the compiled function.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Int[Tensor, "batch prompt"],
        capacity: int,
        compile_forward: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self.model: Any = model
        self.is_compiled = compile_forward is not None
        self.cache_argument = cache_argument(model)
        self.forward = self.model.forward
        if compile_forward is not None:
            self.forward = compile_forward(self.forward)
        self.cache = StaticCache(config=model.config, max_cache_len=capacity)
        self.length = prompts.shape[1]
        self.slots = torch.arange(capacity, device=prompts.device)
        # The static tensors: tokens so far, last tokens with their positions, and soundness.
        self.history = torch.zeros(
            len(prompts), capacity + 1, dtype=torch.long, device=prompts.device
        )
        self.history[:, : self.length] = prompts
        self.token = prompts[:, -1:].clone()
        self.position = torch.full_like(self.token, self.length - 1)
        self.is_finite = torch.ones_like(self.token[:, 0], dtype=torch.bool)
        self._read(prompts[:, :-1])

    @torch.no_grad()
    def step(self) -> None:
        """Decode one token of each sequence, without waiting for the device."""
        if self.is_compiled:
            torch.compiler.cudagraph_mark_step_begin()
        logits = self.forward(
            input_ids=self.token,
            position_ids=self.position,
            attention_mask=self._mask(self.position),
            use_cache=True,
            **{self.cache_argument: self.cache},
        ).logits
        best = logits[:, -1].max(dim=-1)
        self.is_finite.logical_and_(best.values.isfinite())
        self.history.scatter_(1, self.position + 1, best.indices[:, None])
        self.token.copy_(best.indices[:, None])
        self.position.add_(1)

    def new_tokens(self) -> list[list[int]]:
        """Return the tokens that were decoded for each sequence; waits for the device."""
        end = int(self.position[0, 0]) + 1
        tokens: list[list[int]] = self.history[:, self.length : end].tolist()
        return tokens

    def _read(self, token_ids: Tensor) -> None:
        """Read the prompts except their last tokens."""
        decoder = self.model.get_decoder()
        for start in range(0, token_ids.shape[1], PREFILL_CHUNK):
            chunk = token_ids[:, start : start + PREFILL_CHUNK]
            positions = torch.arange(start, start + chunk.shape[1], device=chunk.device)
            positions = positions.expand(len(chunk), -1)
            decoder(
                input_ids=chunk,
                position_ids=positions,
                attention_mask=self._mask(positions),
                use_cache=True,
                **{cache_argument(decoder): self.cache},
            )

    def _mask(self, positions: Int[Tensor, "batch queries"]) -> Tensor:
        """Return the slots that each query attends to [batch, 1, queries, slots]."""
        return (self.slots <= positions[:, :, None])[:, None]


class Baseline(NamedTuple):
    """The fastest autoregressive decoding at a context, and the captured static cache there."""

    arm: str
    ms: float  # milliseconds per token
    captured_ms: float


def measure_autoregressive_arms(
    bench: Workbench, found: Mapping[str, SectionResult]
) -> Iterator[Row]:
    """Yield the rows of the section.

    Args:
        bench: target and prompts.
        found: results of earlier sections; they are not used.
    """
    for context in bench.scale.contexts:
        prompts = bench.prompts(context)
        arms = {name: partial(arm, bench, prompts) for name, arm in ARMS.items()}
        yield from measured_rows(arms, {"context": context}, bench.scale)


def baseline_of(found: Mapping[str, SectionResult], context: int) -> Baseline | None:
    """Return the fastest arm at a context; None if the section has no result there.

    Args:
        found: results of earlier sections.
        context: number of tokens of the prompt.
    """
    rows = found["autoregressive"].rows if "autoregressive" in found else ()
    ms = {
        row.arm: number
        for row in rows
        if row.conditions.get("context") == context and (number := row.number("ms")) is not None
    }
    if CAPTURED not in ms:
        return None
    fastest = min(ms, key=lambda arm: ms[arm])
    return Baseline(fastest, ms[fastest], ms[CAPTURED])


def static_arm(bench: Workbench, prompts: list[list[int]], *, is_captured: bool) -> TimedArm:
    """Return transformers' static cache, with an eager step or a step in a CUDA graph.

    Args:
        bench: target and checks.
        prompts: prompts of equal length, which are read now.
        is_captured: whether the step is captured.
    """
    decoding = _decoding(bench, prompts)
    step = captured(decoding.step, bench.device) if is_captured else decoding.step
    return _static(bench, prompts, decoding, step, ON_CPU if is_captured else None)


def _decoding(
    bench: Workbench,
    prompts: list[list[int]],
    compile_forward: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> StaticDecoding:
    new_tokens = bench.scale.timed_tokens + 2 * WARM_UP
    capacity = bench.scale.capacity(len(prompts[0]), new_tokens)
    ids = torch.tensor(prompts, device=bench.device)
    return StaticDecoding(bench.model, ids, capacity, compile_forward)


def _static(
    bench: Workbench,
    prompts: list[list[int]],
    decoding: StaticDecoding,
    step: Work,
    remark_on_cpu: str | None,
) -> TimedArm:
    def fault() -> str | None:
        if not bool(decoding.is_finite.all()):
            return "logits are not finite"
        return bench.fault(prompts, decoding.new_tokens())

    remark = remark_on_cpu if bench.device.type == "cpu" else None
    block = bench.scale.block
    return TimedArm(repeated(step, block), units=block, fault=fault, remark=remark)


def _compiled_static(bench: Workbench, prompts: list[list[int]]) -> TimedArm:
    """Return transformers' static cache with a compiled forward pass."""
    decoding = _decoding(bench, prompts, partial(compiled, device=bench.device))
    return _static(bench, prompts, decoding, decoding.step, ON_CPU)


def _by_generate(bench: Workbench, prompts: list[list[int]]) -> TimedArm:
    """Return transformers' `generate()`, which continues from a cache of the prompt."""
    model: Any = bench.model
    cache = DynamicCache(config=model.config)
    ids = torch.tensor(prompts, device=bench.device)
    block = bench.scale.block
    with torch.no_grad():
        decoder = model.get_decoder()
        decoder(input_ids=ids[:, :-1], use_cache=True, **{cache_argument(decoder): cache})

    def work() -> None:
        nonlocal ids
        ids = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=block,
            do_sample=False,
            pad_token_id=0,
            **{cache_argument(model): cache},
        )

    def fault() -> str | None:
        return bench.fault(prompts, ids[:, len(prompts[0]) :].tolist())

    return TimedArm(work, units=block, fault=fault)


def _own(bench: Workbench, prompts: list[list[int]], *, is_captured: bool) -> TimedArm:
    """Return this package's decoding loop without drafts, with eager or captured steps."""
    pipelines = PipelinePool() if is_captured else None
    run = bench.start(None, prompts, bench.scale.timed_tokens + 1, pipelines=pipelines)
    arm = bench.steps(run, prompts, bench.scale.block)
    is_on_cpu = bench.device.type == "cpu"
    return replace(arm, remark=ON_CPU if is_captured and is_on_cpu else None)


ARMS: dict[str, Builder] = {
    "transformers": _by_generate,
    "transformers static cache": partial(static_arm, is_captured=False),
    "transformers static cache compiled": _compiled_static,
    CAPTURED: partial(static_arm, is_captured=True),
    "ours": partial(_own, is_captured=False),
    "ours captured": partial(_own, is_captured=True),
}
