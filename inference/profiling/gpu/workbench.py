"""The parts that all sections measure with: target, drafter, prompts, and checks of tokens."""

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedModel

from inference.benchmark.timing import note
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.loop import DecodeRun
from inference.engine.pipeline import PipelinePool
from inference.profiling.gpu.arms import TimedArm
from inference.profiling.gpu.cycle import Cycle
from inference.profiling.gpu.cycle_drafter import CycleDrafter
from inference.profiling.gpu.scale import Scale
from inference.profiling.gpu.target import build_cycle_target
from inference.profiling.subject import start
from inference.protocol import Drafter
from inference.trees.shape import TreePlan
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings, ExpertsSettings, TrunkSettings
from jakiro.levels.schedule import ScheduleSettings
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target
from jakiro.utils.sequences import common_length

UNPROCESSED = {"top_k": 0, "top_p": 1.0}  # sampling options: the distribution is not truncated


@dataclass(frozen=True)
class Workbench:
    """A target that follows a cycle, random drafters for this target, and prompts."""

    scale: Scale
    cycle: Cycle
    target: TargetAdapter

    @property
    def device(self) -> torch.device:
        """The device of the target."""
        return self.target.device

    @property
    def model(self) -> PreTrainedModel:
        """The target as a Hugging Face model."""
        return self.target.model

    @cached_property
    def drafter(self) -> JakiroDrafter:
        """A random drafter with a draft vocabulary."""
        return self.new_drafter(self.scale.draft_vocab_size)

    @cached_property
    def trained(self) -> TrainedDrafter:
        """The random drafter as a drafter of trees of the scale's shapes."""
        return TrainedDrafter(self.drafter, self.target, self.scale.plan)

    def new_drafter(self, draft_vocab_size: int | None) -> JakiroDrafter:
        """Return a random drafter with memory, two experts and a parallel level.

        Args:
            draft_vocab_size: number of tokens that may be drafted; None for all tokens.
        """
        torch.manual_seed(1)
        settings = DrafterSettings(
            trunk=TrunkSettings(kind="hybrid"),
            experts=ExpertsSettings(num_experts=2, intermediate_size=512),
            schedule=ScheduleSettings(autoregressive_levels=2, parallel_levels=1),
            draft_vocab_size=draft_vocab_size,
        )
        with self.device:
            drafter = JakiroDrafter(config_for(settings, record_target(self.target.spec, "random")))
        return drafter.eval().to(device=self.device, dtype=self.target.dtype)

    def oracle(self, tau: int, *, is_drafting: bool, plan: TreePlan | None = None) -> CycleDrafter:
        """Return a drafter with `tau` tokens per decoding step.

        Args:
            tau: number of tokens per decoding step, at least 2.
            is_drafting: whether the random drafter drafts every tree before its tokens are
                replaced.
            plan: shapes of the trees; None for those of the scale.
        """
        inner = self.trained if is_drafting else None
        return CycleDrafter(self.cycle, tau - 1, plan or self.scale.plan, inner)

    def prompts(self, length: int, count: int = 1) -> list[list[int]]:
        """Return prompts of random tokens, which are the same in every call.

        Args:
            length: number of tokens of each prompt.
            count: number of prompts.
        """
        generator = torch.Generator().manual_seed(length)
        vocab_size = self.target.spec.vocab_size
        tokens: list[list[int]] = torch.randint(
            vocab_size, (count, length), generator=generator
        ).tolist()
        return tokens

    def start(
        self,
        drafter: Drafter | None,
        prompts: list[list[int]],
        new_tokens: int,
        temperature: float = 0.0,
        pipelines: PipelinePool | None = None,
        **generation: Any,
    ) -> DecodeRun:
        """Return a new decoding run over the given prompts.

        Args:
            drafter: drafter; None for autoregressive decoding.
            prompts: token ids of each prompt.
            new_tokens: number of new tokens per prompt.
            temperature: sampling temperature; 0 is greedy.
            pipelines: pool of a run with captured steps; None for a run without them.
            **generation: further arguments of `generate()`, such as `top_p`.
        """
        options = {**(UNPROCESSED if temperature else {}), **generation}
        return start(self.target, drafter, prompts, new_tokens, temperature, pipelines, **options)

    def steps(self, run: DecodeRun, prompts: list[list[int]], count: int, tau: int = 1) -> TimedArm:
        """Return an arm that performs decoding steps of a run; the prompts are read now.

        Args:
            run: run that has not started yet.
            prompts: prompts of the run.
            count: number of decoding steps per call.
            tau: number of tokens per decoding step.
        """
        iterator = iter(run)
        next(iterator)  # reads the prompts

        def work() -> None:
            done = sum(1 for _ in islice(iterator, count))
            assert done == count, "the run has ended early"

        def fault() -> str | None:
            tokens = [state.token_ids[len(state.request.token_ids) :] for state in run.sequences]
            return self.fault(prompts, tokens) or fault_of_tau(run, tau)

        return TimedArm(work, units=count * tau, fault=fault)

    def fault(self, prompts: list[list[int]], new_tokens: list[list[int]]) -> str | None:
        """Return what is wrong with the new tokens of prompts; None if they follow the cycle.

        Args:
            prompts: prompts, which determine all new tokens.
            new_tokens: new tokens of each prompt.
        """
        for prompt, tokens in zip(prompts, new_tokens, strict=True):
            right = self.cycle.following(prompt[-1], len(tokens))
            if not tokens:
                return "there are no new tokens"
            if tokens != right:
                first = common_length(tokens, right)
                return f"new token {first} is {tokens[first]} instead of {right[first]}"
        return None


def fault_of_tau(run: DecodeRun, tau: int) -> str | None:
    """Return a description of the fault if a run does not have the intended tau; None otherwise.

    Args:
        run: run of an oracle, or of autoregressive decoding.
        tau: intended number of tokens per decoding step.
    """
    if run.stats.tau == tau:
        return None
    return f"tau is {run.stats.tau:.3f} instead of {tau}"


def build_workbench(scale: Scale, device: torch.device) -> Workbench:
    """Return the target and everything else that the sections measure with.

    Args:
        scale: sizes of the measurements.
        device: device of the target.
    """
    geometry = scale.geometry
    note(f"a random target with {geometry.num_layers} layers on {device}")
    cycle = Cycle(geometry.vocab_size, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_cycle_target(geometry, cycle, device, dtype)
    return Workbench(scale, cycle, TargetAdapter(model))
