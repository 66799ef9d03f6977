"""Decoding by `generate()` of transformers, with or without drafts."""

import math
import time
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer

from inference.benchmark.document import Continuation, Decoded
from inference.benchmark.methods import SamplingOptions
from inference.benchmark.settings import COMPILED, TRANSFORMERS
from inference.engine.stats import DecodeStats
from jakiro.utils.devices import num_threads
from jakiro.utils.pretrained import end_ids

CACHE_BUCKET = 256  # lengths of static caches are multiples of this


class TransformersDecoding:
    """A method that decodes with the target's own `generate()`.

    Args:
        family: name of the method of which this is one of several settings; None for `name`.
        **how: further arguments of `generate()`, such as `prompt_lookup_num_tokens`.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        model: PreTrainedModel,
        family: str | None = None,
        *,
        threads: int | None = None,
        **how: Any,
    ) -> None:
        self.name = name
        self.family = family or name
        self.kind = kind
        self.threads = threads
        self._model = model
        self._how = how

    def decode(self, prompts: list[list[int]], options: SamplingOptions, seed: int) -> Decoded:
        """Continue prompts together, with padding on the left."""
        input_ids, mask = self._pad(prompts)
        sampling = {"do_sample": True, "temperature": options.temperature, **options.limits}
        generate: Any = self._model.generate
        torch.manual_seed(seed)
        watch = _Deliveries(self.threads)
        with num_threads(self._prompt_threads):
            tokens = generate(
                input_ids,
                attention_mask=mask,
                max_new_tokens=options.max_new_tokens,
                streamer=watch,
                pad_token_id=0,
                **(sampling if options.temperature else {"do_sample": False}),
                **self._how,
                **self._cache(input_ids.shape[1] + options.max_new_tokens),
            )
        first, total = watch.first, watch.seconds
        parts = {"prefill": first} | ({} if self._is_drafting else {"verify": total - first})
        continuations = [
            self._continuation(sequence, watch)
            for sequence in tokens[:, input_ids.shape[1] :].tolist()
        ]
        return Decoded(continuations, parts)

    def reset(self) -> None:
        """Do nothing, because nothing is learned."""

    def _cache(self, length: int) -> dict[str, Any]:
        return {}

    @property
    def _is_drafting(self) -> bool:
        return self.kind not in (TRANSFORMERS, COMPILED)

    @property
    def _prompt_threads(self) -> int | None:
        """The number of threads that read the prompt: torch's current one, as in this package."""
        return torch.get_num_threads()

    def _pad(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return token ids with padding on the left, and the mask of those that are a prompt's."""
        width, device = max(map(len, prompts)), self._model.device
        padded = [[0] * (width - len(ids)) + ids for ids in prompts]
        masks = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        return torch.tensor(padded, device=device), torch.tensor(masks, device=device)

    def _continuation(self, sequence: list[int], watch: "_Deliveries") -> Continuation:
        """Return the new tokens of a sequence before its padding, with their statistics."""
        ends = set(end_ids(self._model.generation_config))
        lengths = (index + 1 for index, token in enumerate(sequence) if token in ends)
        ids = sequence[: next(lengths, len(sequence))]
        # Without drafts, every token after the one from prefill needs one forward pass.
        stats = DecodeStats(
            from_prefill=min(watch.num_first, len(ids)),
            emitted=len(ids),
            target_forwards=(watch.count if self._is_drafting else len(ids)) - 1,
        )
        return Continuation(ids, watch.first, stats)


class CompiledDecoding(TransformersDecoding):
    """`generate()` with a compiled forward pass and a static cache.

    Each decoding step attends to the whole cache, whose length is rounded up, so that prompts of
    similar lengths share what was compiled.
    """

    def _cache(self, length: int) -> dict[str, Any]:
        compiling: Any = CompileConfig(mode="default")
        compiling._compile_all_devices = True  # otherwise, nothing is compiled on a CPU
        size = -(-length // CACHE_BUCKET) * CACHE_BUCKET
        cache = StaticCache(self._model.config.get_text_config(), max_cache_len=size)
        return {"past_key_values": cache, "compile_config": compiling}

    @property
    def _prompt_threads(self) -> int | None:
        """The number of threads of all steps: another number would be compiled again."""
        return self.threads


class _Deliveries(BaseStreamer):
    """Counter of the deliveries of tokens, after each forward pass of the target.

    After the first delivery, the number of threads is set to `threads`, so that only prefill uses
    another number.

    Attributes:
        first: seconds until the first delivery; infinite before it.
        num_first: number of tokens of a sequence in it.
    """

    def __init__(self, threads: int | None) -> None:
        self.threads = threads
        self.count = -1  # the prompt arrives first
        self.first = math.inf
        self.num_first = 0
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The seconds since the start of decoding."""
        return time.perf_counter() - self._started

    def put(self, value: Tensor) -> None:
        """Receive the prompt first, then the new tokens of every sequence."""
        self.count += 1
        if self.count == 1:
            self.first = self.seconds
            self.num_first = value.numel() if value.dim() > 1 else 1
            if self.threads is not None:
                torch.set_num_threads(self.threads)

    def end(self) -> None:
        """Do nothing, because all tokens have been delivered."""
