"""Decoding on a GPU against transformers, with random weights: `python -m inference.profiling`.

The target is a random Llama that continues every token with its successor in a cycle. With plain
random weights, the largest logits would be nearly equal in half precision, so tokens would depend
on rounding. An oracle lets a random drafter draft every tree in full and then replaces the tokens,
so that a known number of them is accepted. The baseline is transformers' forward pass with a static
cache, captured in a CUDA graph. All arms are timed in turn, and all tokens are checked.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, StaticCache

from inference.benchmark.document import device_name, now
from inference.draft_tree import ROOT, DraftTree
from inference.drafters.trained.drafter import TrainedDrafter, TrainedSession
from inference.engine.captured import CapturedPool
from inference.engine.cuda_graph import RecordedFunction
from inference.engine.loop import DecodeRun
from inference.generation.preparation import prepare_requests
from inference.protocol import Budget, Drafter
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreePlan, TreeShape
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import (
    DrafterSettings,
    ExpertsSettings,
    ScheduleSettings,
    TrunkSettings,
)
from jakiro.errors import NumericalError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.checks import cache_argument
from jakiro.target.record import record_target
from jakiro.utils.devices import choose_device
from jakiro.utils.provenance import provenance

BASELINE = "transformers, static cache"
_BUCKET = 64  # capacities of static caches are multiples, so that masks align
_PREFILL_CHUNK = 1024  # tokens of a prompt per forward pass
_WARM_UP = 3  # repetitions whose time is not counted
_LOGIT = 64.0  # logit of the right token, approximately; those of other tokens are much smaller
_LAYER_SCALE = 0.01  # of the matrices through which layers change the hidden state


@dataclass(frozen=True)
class Scale:
    model: dict[str, int]
    draft_vocab_size: int
    tree: TreeShape
    context: int = 2048
    taus: tuple[int, ...] = (2, 3, 4)
    batches: tuple[int, ...] = (1, 8)
    block: int = 24
    repeats: int = 20

    @property
    def blocks(self) -> int:
        """The number of times that each arm decodes `block` tokens."""
        return _WARM_UP + self.repeats


FULL = Scale(  # the geometry of an 8B model
    model={
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
    },
    draft_vocab_size=32_768,
    tree=TreeShape(autoregressive_levels=3, parallel_levels=1, children=4, breadth=5, num_nodes=60),
)


class Cycle:
    """A random permutation of all tokens that consists of one cycle: each has a successor."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))
        successor = torch.empty_like(order)
        successor[order] = order.roll(-1)
        self.successor = successor.to(device)
        self._on_host: list[int] = successor.tolist()

    def following(self, token: int, count: int) -> list[int]:
        tokens: list[int] = []
        for _ in range(count):
            token = self._on_host[token]
            tokens.append(token)
        return tokens

    def levels(self, root: Int[Tensor, "batch 1"], depth: int) -> Int[Tensor, "batch depth"]:
        tokens = [root]
        for _ in range(depth):
            tokens.append(self.successor[tokens[-1]])
        return torch.cat(tokens[1:], dim=1)

    def check(self, prompts: list[list[int]], new_tokens: list[list[int]]) -> None:
        """Raise an error unless the new tokens of each prompt follow the cycle."""
        for prompt, tokens in zip(prompts, new_tokens, strict=True):
            right = self.following(prompt[-1], len(tokens))
            if not tokens or tokens != right:
                raise NumericalError("the new tokens are wrong", expected=right, got=tokens)


@torch.no_grad()
def build_cycle_target(scale: Scale, cycle: Cycle, device: torch.device) -> PreTrainedModel:
    """Return a random Llama that always continues with the successor of the last token.

    The layers change the embedding of the last token only slightly, and the head's row of a token
    is parallel to the embedding of the token's predecessor. The time of a forward pass is that of
    any model with the same geometry.
    """
    config = LlamaConfig(
        **scale.model,  # type: ignore[arg-type]
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,  # so that all runs have the same length
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(_LAYER_SCALE)
        layer.mlp.down_proj.weight.mul_(_LAYER_SCALE)
    embeddings = model.get_input_embeddings().weight.normal_()
    # The last norm gives the hidden state the length sqrt(hidden_size).
    directions = embeddings / embeddings.norm(dim=1, keepdim=True)
    head = model.get_output_embeddings().weight
    head[cycle.successor] = directions * (_LOGIT / sqrt(config.hidden_size))
    return model.eval()


class CycleDrafter(TrainedDrafter):
    """Drafts trees with right tokens on one path of `num_right` levels, and wrong ones elsewhere.

    Args:
        drafter: random drafter, which drafts every tree in full before its tokens are replaced.
        num_right: number of levels with a right token; tau is `num_right` + 1.
    """

    def __init__(
        self,
        drafter: JakiroDrafter,
        target: TargetAdapter,
        tree: TreeShape,
        cycle: Cycle,
        num_right: int,
    ) -> None:
        super().__init__(drafter, target, TreePlan.of(tree))
        assert 1 <= num_right <= tree.depth
        self.cycle = cycle
        self.num_right = num_right

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "CycleSession":
        return CycleSession(self, sampling, capacity, batch)

    def with_right_tokens(self, tree: DraftTree, root: Int[Tensor, "batch 1"]) -> DraftTree:
        """Return a tree of the same structure in which only tokens on one path are right.

        Siblings get consecutive tokens in the order of their ranks.
        """
        right = self.cycle.levels(root, tree.max_depth)
        is_end = (tree.depth == self.num_right) & tree.is_valid
        path = [is_end.long().argmax(dim=1, keepdim=True)]
        for _ in range(self.num_right - 1):
            path.append(tree.parent.gather(1, path[-1]).clamp(min=0))
        nodes = torch.cat(path[::-1], dim=1)
        parents = torch.cat((torch.full_like(nodes[:, :1], ROOT), nodes[:, :-1]), dim=1)
        ranks = tree.rank.gather(1, nodes)

        at_depth = right.gather(1, tree.depth - 1)
        level = (tree.depth - 1).clamp(max=self.num_right - 1)
        is_on_path = (tree.depth <= self.num_right) & (tree.parent == parents.gather(1, level))
        first = torch.where(is_on_path, at_depth - ranks.gather(1, level), at_depth + 1)
        return replace(tree, token_ids=(first + tree.rank) % len(self.cycle.successor))


class CycleSession(TrainedSession):
    drafter: CycleDrafter

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        assert self.root is not None
        return self.drafter.with_right_tokens(super().propose(budget, random), self.root)


class StaticDecoding:
    """Greedy decoding with transformers' static cache, one token of each sequence at a time.

    The masks are passed to the model, so that neither the model nor the cache determines them on
    the host. On a GPU, the step is captured in a CUDA graph.
    """

    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, prompts: Int[Tensor, "batch prompt"], new_tokens: int
    ) -> None:
        self.model: Any = model
        self.length = prompts.shape[1]
        capacity = -(-(self.length + new_tokens) // _BUCKET) * _BUCKET
        self.cache = StaticCache(config=model.config, max_cache_len=capacity)
        self.slots = torch.arange(capacity, device=prompts.device)
        self.history = prompts.new_zeros(len(prompts), capacity + 1)
        self.history[:, : self.length] = prompts
        self.token = prompts[:, -1:].clone()
        self.position = torch.full_like(self.token, self.length - 1)
        decoder = self.model.get_decoder()
        for start in range(0, self.length - 1, _PREFILL_CHUNK):
            chunk = prompts[:, start : min(start + _PREFILL_CHUNK, self.length - 1)]
            positions = start + torch.arange(chunk.shape[1], device=chunk.device)
            self._forward(decoder, chunk, positions.expand(len(chunk), -1))
        state = (self.history, self.token, self.position)
        self.step = RecordedFunction(self._step, state, prompts.device)

    @property
    def new_tokens(self) -> list[list[int]]:
        """The tokens that were decoded for each sequence; waits for the device."""
        end = int(self.position[0, 0]) + 1
        tokens: list[list[int]] = self.history[:, self.length : end].tolist()
        return tokens

    @torch.no_grad()
    def _step(self) -> Tensor:
        logits = self._forward(self.model, self.token, self.position).logits
        best = logits[:, -1].argmax(dim=-1, keepdim=True)
        self.history.scatter_(1, self.position + 1, best)
        self.token.copy_(best)
        self.position.add_(1)
        return self.token

    def _forward(self, model: Any, token_ids: Tensor, positions: Tensor) -> Any:
        return model(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=(self.slots <= positions[:, :, None])[:, None],
            use_cache=True,
            **{cache_argument(model): self.cache},
        )


# Decodes a block before each number of tokens that it yields, and checks all tokens at the end.
Arm = Iterator[int]


class GPUProfile:
    """A target that follows a cycle, and the arms that decode with it."""

    def __init__(self, scale: Scale, device: torch.device) -> None:
        self.scale = scale
        self.cycle = Cycle(scale.model["vocab_size"], device)
        self.target = TargetAdapter(build_cycle_target(scale, self.cycle, device))
        torch.manual_seed(1)
        settings = DrafterSettings(
            trunk=TrunkSettings(kind="hybrid"),
            experts=ExpertsSettings(num_experts=2, intermediate_size=512),
            schedule=ScheduleSettings(autoregressive_levels=2, parallel_levels=1),
            draft_vocab_size=scale.draft_vocab_size,
        )
        record = record_target(self.target.spec, "random")
        with device:
            drafter = JakiroDrafter(config_for(settings, record))
        self.drafter = drafter.eval().to(device=device, dtype=self.target.dtype)

    def rows(self) -> Iterator[dict[str, Any]]:
        for batch in self.scale.batches:
            generator = torch.Generator().manual_seed(batch)
            size = (batch, self.scale.context)
            prompts = torch.randint(self.target.spec.vocab_size, size, generator=generator)
            seconds = self._interleaved(self._arms(prompts.tolist()))
            baseline = median(seconds[BASELINE])
            for name, taken in seconds.items():
                yield {
                    "batch": batch,
                    "arm": name,
                    "ms": 1e3 * median(taken),
                    "ms_fastest": 1e3 * min(taken),
                    "ms_slowest": 1e3 * max(taken),
                    "ratio": baseline / median(taken),
                }

    def _interleaved(self, arms: dict[str, Arm]) -> dict[str, list[float]]:
        """Return the seconds per token of each arm in each repeat; the order of the arms rotates.

        A drift of the machine's speed then affects all arms equally.
        """
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        names = list(arms)
        for _ in range(self.scale.blocks):
            names = [*names[1:], names[0]]
            for name in names:
                started = now()
                tokens = next(arms[name])
                seconds[name].append((now() - started) / tokens)
        for arm in arms.values():
            assert next(arm, None) is None
        return {name: taken[_WARM_UP:] for name, taken in seconds.items()}

    def _arms(self, prompts: list[list[int]]) -> dict[str, Arm]:
        arms = {BASELINE: self._static(prompts)}
        for captured in (True, False):
            kind = "captured" if captured else "ordinary"
            arms[f"autoregressive, {kind}"] = self._ours(prompts, 1, captured)
            for tau in self.scale.taus:
                arms[f"tau {tau}, {kind}"] = self._ours(prompts, tau, captured)
        return arms

    def _static(self, prompts: list[list[int]]) -> Arm:
        blocks, block = self.scale.blocks, self.scale.block
        ids = torch.tensor(prompts, device=self.target.device)
        decoding = StaticDecoding(self.target.model, ids, blocks * block)
        for _ in range(blocks):
            for _ in range(block):
                decoding.step()
            yield block
        self.cycle.check(prompts, decoding.new_tokens)

    def _ours(self, prompts: list[list[int]], tau: int, captured: bool) -> Arm:
        scale = self.scale
        steps = scale.block // tau
        drafter: Drafter | None = None
        if tau > 1:
            drafter = CycleDrafter(self.drafter, self.target, scale.tree, self.cycle, tau - 1)
        new_tokens = (steps * scale.blocks + 1) * tau + 1
        run = self.start(drafter, prompts, new_tokens, captured=captured)
        iterator = iter(run)
        next(iterator)  # reads the prompts
        for _ in range(scale.blocks):
            assert sum(1 for _ in islice(iterator, steps)) == steps, "the run has ended early"
            yield steps * tau
        self.cycle.check(prompts, [state.new_token_ids for state in run.sequences])
        assert run.stats.tau == tau
        run.close()

    def start(
        self,
        drafter: Drafter | None,
        prompts: list[list[int]],
        new_tokens: int,
        *,
        captured: bool = False,
    ) -> DecodeRun:
        requests, _ = prepare_requests(
            self.target.model,
            prompts,
            {"max_new_tokens": new_tokens},
            temperature=0.0,
            seed=0,
            max_position=self.target.spec.max_position,
        )
        pool = CapturedPool() if captured else None
        return DecodeRun(self.target, drafter, requests, pool=pool)


def main() -> None:
    """Measure all arms on a GPU; print them, and write them to a JSON file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write")
    path = parser.parse_args().json
    device = choose_device("cuda")
    rows = []
    for row in GPUProfile(FULL, device).rows():
        rows.append(row)
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
    document = {**provenance(), "device": device_name(device), "scale": asdict(FULL), "rows": rows}
    if path is not None:
        path.write_text(json.dumps(document, indent=1, default=TreeShape.model_dump) + "\n")


if __name__ == "__main__":
    main()
