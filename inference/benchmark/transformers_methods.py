"""Decoding by `generate()` of transformers, with or without drafts."""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer

from inference.benchmark.method_names import COMPILED, TRANSFORMERS
from inference.benchmark.methods import SamplingOptions
from inference.benchmark.samples import Arrival, Continuation, Decoded
from inference.engine.stats import DecodeStats
from inference.engine.threads import num_threads
from inference.trees.shape import TreeShape
from jakiro.utils.pretrained import end_ids

CACHE_BUCKET = 256  # lengths of static caches are multiples of this


class TransformersDecoding:
    """A method that decodes with the target's own `generate()`.

    Args:
        family: name under which the fastest of several settings is reported; None for `name`.
        **how: further arguments of `generate()`, such as `prompt_lookup_num_tokens`.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        model: PreTrainedModel,
        family: str | None = None,
        *,
        note: str = "",
        threads: int | None = None,
        **how: Any,
    ) -> None:
        self.name = name
        self.family = family or name
        self.kind = kind
        self.note = note
        self.threads = threads
        self._model = model
        self._how = how
        self._assistant = how.get("assistant_model")
        self._before = copy.deepcopy(getattr(self._assistant, "generation_config", None))

    def decode(self, prompts: list[list[int]], options: SamplingOptions, seed: int) -> Decoded:
        """Continue prompts together, with padding on the left."""
        input_ids, mask = self._padded(prompts)
        sampling = {"do_sample": True, "temperature": options.temperature, **options.limits}
        generate: Any = self._model.generate
        torch.manual_seed(seed)
        with self._watched() as watch:
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
        sequences = tokens[:, input_ids.shape[1] :].tolist()
        return Decoded([self._continuation(sequence, watch) for sequence in sequences], watch.parts)

    def reset(self) -> None:
        """Restore the assistant's generation config, which transformers may change in `decode`."""
        if self._assistant is not None:
            self._assistant.generation_config = copy.deepcopy(self._before)

    def tree(self, temperature: float) -> TreeShape | None:
        """Return None, because transformers does not draft trees."""
        return None

    @property
    def parameters(self) -> int | None:
        """The number of the assistant's parameters; None if there is no assistant."""
        return None if self._assistant is None else int(self._assistant.num_parameters())

    def _cache(self, length: int) -> dict[str, Any]:
        return {}

    @contextmanager
    def _watched(self) -> Iterator["_ForwardTimer"]:
        """Record the seconds of prefill and of the forward passes after it.

        The prompt is read with torch's current number of threads, as in this package.
        """
        watch = _ForwardTimer(self.threads)
        handles = [
            self._model.register_forward_pre_hook(watch.begin_forward),
            self._model.register_forward_hook(watch.end_forward),
        ]
        try:
            with num_threads(torch.get_num_threads()):
                yield watch
        finally:
            for handle in handles:
                handle.remove()

    def _padded(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return token ids with padding on the left, and the mask of those that are a prompt's."""
        width, device = max(map(len, prompts)), self._model.device
        padded = [[0] * (width - len(ids)) + ids for ids in prompts]
        masks = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        return torch.tensor(padded, device=device), torch.tensor(masks, device=device)

    def _continuation(self, sequence: list[int], watch: "_ForwardTimer") -> Continuation:
        """Return the new tokens of a sequence before its padding, with their statistics."""
        ends = set(end_ids(self._model.generation_config))
        found = (index + 1 for index, token in enumerate(sequence) if token in ends)
        ids = sequence[: next(found, len(sequence))]
        # Without drafts, every token after the one from prefill needs one forward pass.
        is_drafting = self.kind not in (TRANSFORMERS, COMPILED)
        forwards = watch.num_forwards - 1 if is_drafting else len(ids) - 1
        arrivals = _first(watch.arrivals, len(ids))
        stats = DecodeStats(
            from_prefill=arrivals[0].num_tokens, emitted=len(ids), target_forwards=forwards
        )
        return Continuation(ids, arrivals, stats)


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

    @contextmanager
    def _watched(self) -> Iterator["_ForwardTimer"]:
        """Record the seconds until the first token, and after it; hooks could not be compiled."""
        watch, started = _ForwardTimer(None), time.perf_counter()
        with num_threads(self.threads):
            yield watch
        first = watch.arrivals[0].seconds
        watch.parts = {"prefill": first, "verify": time.perf_counter() - started - first}


class _ForwardTimer(BaseStreamer):
    """Recorder of delivery times and of the seconds of the model's forward passes.

    After each forward pass, the number of threads is set to `threads`, so that only prefill
    uses torch's own number.
    """

    def __init__(self, threads: int | None) -> None:
        self.threads = threads
        self.arrivals: list[Arrival] = []
        self.parts = {"prefill": 0.0, "verify": 0.0}
        self.num_forwards = 0
        self._started = time.perf_counter()
        self._forward_started = 0.0
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        """Receive the prompt first, then the new tokens of every sequence."""
        if self._has_prompt:
            count = value.numel() if value.dim() > 1 else 1
            self.arrivals.append(Arrival(time.perf_counter() - self._started, count))
        self._has_prompt = True

    def end(self) -> None:
        """Do nothing, because all tokens have been delivered."""

    def begin_forward(self, *_: object) -> None:
        """Record the start of a forward pass."""
        self._forward_started = time.perf_counter()

    def end_forward(self, *_: object) -> None:
        """Record the end of a forward pass; the first forward pass is prefill."""
        part = "verify" if self.num_forwards else "prefill"
        self.parts[part] += time.perf_counter() - self._forward_started
        self.num_forwards += 1
        if self.threads is not None:
            torch.set_num_threads(self.threads)


def _first(arrivals: Sequence[Arrival], count: int) -> list[Arrival]:
    """Return the arrivals of the first `count` tokens."""
    kept: list[Arrival] = []
    for arrival in arrivals:
        if count > 0:
            kept.append(Arrival(arrival.seconds, min(arrival.num_tokens, count)))
            count -= arrival.num_tokens
    return kept
