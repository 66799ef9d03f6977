"""The public decoder: any Hugging Face causal LM, unmodified, and a drafter that speeds it up."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from inference.autotune.costs import known_costs
from inference.autotune.online import AutoTree
from inference.autotune.search import default_tree, largest_trees
from inference.autotune.tau_watch import TauWatch
from inference.conversation import Conversation
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.combined.knowledge import CombinedSettings
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.details import OutputOptions, record_for
from inference.engine.loop import DecodeRun, DecodeStep
from inference.engine.policy import AlwaysDraft, DraftPolicy
from inference.engine.request import Request
from inference.generation.custom_generate import Handover
from inference.generation.preparation import prepare_requests
from inference.generation.prompts import Prompt, encode_prompt, unpadded
from inference.generation.streaming import TextStream, feed, pieces
from inference.generation.unsupported import refuse_arguments
from inference.loading import load_parts, tokenizer_at
from inference.outputs import GenerateOutput, in_transformers_form, outputs_of
from inference.protocol import Drafter
from inference.trees.shape import TreePlan, TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError, PromptError
from jakiro.target.adapter import TargetAdapter, compile_mode
from jakiro.target.checks import CausalLM
from jakiro.target.record import check_target, check_tokenizer

Trees = TreeShape | TreePlan | Literal["auto"]


class Decoding:
    """A target, perhaps a drafter, and runs; arguments and errors as for `SpeculativeDecoder`."""

    def __init__(
        self,
        target: CausalLM,
        drafter: JakiroDrafter | Drafter | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        tree: Trees | None = None,
        *,
        beside: AdedDrafter | LookupDrafter | None = None,
        sharing: CombinedSettings | None = None,
        compiled: bool = False,
    ) -> None:
        self.target = TargetAdapter(target.eval())
        if compiled:
            self.target.compile()
        self.tokenizer = tokenizer
        self.drafter: Drafter | None = None
        if isinstance(drafter, JakiroDrafter):
            self.drafter = self._trained(drafter, tree, compiled)
        elif drafter is not None:
            _refuse_tree(tree)
            self.drafter = drafter
        if beside is not None:
            self.drafter = _combined(self.drafter, beside, tree, sharing)
        elif sharing is not None:
            raise ConfigError(
                "one drafter shares its trees with no other",
                expected="sharing= together with beside=",
                got="sharing= alone",
                remedy="pass beside=, or give CombinedDrafter its settings itself",
            )
        self.policy = self._policy(is_auto=tree == "auto")
        # Only the trees of the evaluation have its tau.
        is_as_evaluated = tree is None and beside is None
        record = (
            drafter.config.record
            if isinstance(drafter, JakiroDrafter) and is_as_evaluated
            else None
        )
        self._watch = TauWatch(record)

    @property
    def plan(self) -> TreePlan | None:
        """The trees of every round; None without a drafter, or where each round has its own."""
        if isinstance(self.drafter, TrainedDrafter) and not isinstance(self.policy, AutoTree):
            return self.drafter.plan
        return None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that each token of a sequence takes in the caches of target and drafter."""
        if self.drafter is None:
            return self.target.new_cache(1, 1).bytes_per_token
        cache = self.target.new_cache(1, 1, self.drafter.hidden_states)
        return cache.bytes_per_token + self.drafter.bytes_per_token

    def start(
        self,
        prompts: Sequence[Prompt],
        *,
        temperature: float | None = None,
        seed: int | None = None,
        **generation: Any,
    ) -> DecodeRun:
        """Return a run over prompts that has yet to begin; arguments as for `generate_batch`.

        Iterating over it yields what each round made certain; what it has counted and timed so far
        can be read at any time.
        """
        requests, config = self._requests(prompts, temperature, seed, generation)
        return self._run(requests, record_for(config, False))

    def reset(self) -> None:
        """Forget what earlier requests have taught: which trees pay, and what texts are like.

        A drafter that learns then gives the same requests, with the same seeds, the same tokens,
        unless some are still being decoded: they go on to teach, and later ones are numbered on.
        """
        self.policy.reset()
        if self.drafter is not None:
            self.drafter.reset()

    def _trained(
        self, drafter: JakiroDrafter, tree: Trees | None, compiled: bool
    ) -> TrainedDrafter:
        """Return a drafter that was checked and brought to the target's device and dtype."""
        record = drafter.config.target_record
        if self.tokenizer is None:
            self.tokenizer = tokenizer_at(record.name_or_path)
        check_target(record, self.target.spec)
        if self.tokenizer is not None:
            check_tokenizer(record, self.tokenizer)
        model = drafter.eval().to(device=self.target.device, dtype=self.target.dtype)
        if compiled:
            model.compile(mode=compile_mode(self.target.device))
        plan = largest_trees(model) if tree == "auto" else tree or default_tree(model)
        return TrainedDrafter(model, self.target, plan)

    def _policy(self, is_auto: bool) -> DraftPolicy:
        if not is_auto or not isinstance(self.drafter, TrainedDrafter):
            return AlwaysDraft(self.drafter)
        return AutoTree(self.drafter.plan, known_costs(self.target, self.drafter.model))

    def _requests(
        self,
        prompts: Sequence[Prompt],
        temperature: float | None,
        seed: int | Sequence[int] | None,
        generation: dict[str, Any],
    ) -> tuple[list[Request], GenerationConfig]:
        refuse_arguments(temperature, generation)
        vocab_size = self.target.spec.vocab_size
        requests, config = prepare_requests(
            self.target.model,
            [encode_prompt(prompt, self.tokenizer, vocab_size) for prompt in prompts],
            seed=seed,
            max_position=self.target.spec.max_position,
            temperature=temperature,
            tokenizer=self.tokenizer,
            **generation,
        )
        return self._numbered(requests), config

    def _numbered(self, requests: list[Request]) -> list[Request]:
        """Return requests whose chance is their own wherever earlier ones have taught something."""
        counter = self.policy.request_counter
        if self.drafter is not None and self.drafter.request_counter is not None:
            counter = self.drafter.request_counter
        if counter is None:
            return requests
        ticket = counter.take()
        return [
            replace(one, sampling=replace(one.sampling, request_index=ticket.number), ticket=ticket)
            for one in requests
        ]

    def _run(self, requests: list[Request], record: OutputOptions | None = None) -> DecodeRun:
        return DecodeRun(requests=requests, record=record, **self._parts())

    def _parts(self) -> dict[str, Any]:
        return {"target": self.target, "drafter": self.drafter, "policy": self.policy}

    def _decode(self, token_ids: list[int]) -> str | None:
        if self.tokenizer is None:
            return None
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def _combined(
    first: Drafter | None,
    second: AdedDrafter | LookupDrafter,
    tree: Trees | None,
    settings: CombinedSettings | None,
) -> CombinedDrafter:
    if not isinstance(first, TrainedDrafter | SmallLMDrafter):
        raise ConfigError(
            "there is no drafter that another one could draft beside",
            expected="a trained drafter or a SmallLMDrafter, with beside=",
            got=type(first).__name__,
            remedy="pass the other one as the drafter itself",
        )
    if tree == "auto":
        raise ConfigError(
            "two drafters that share a tree decide by themselves how",
            expected='no tree="auto" with beside=',
            got=tree,
            remedy="leave out one of them",
        )
    return CombinedDrafter(first, second, settings)


def _refuse_tree(tree: Trees | None) -> None:
    if tree is not None:
        raise ConfigError(
            "only the trees of a trained drafter have a shape",
            expected="no tree= with a drafter that needs no training",
            got=tree,
            remedy="set num_nodes and depth in the drafter's own settings",
        )


class SpeculativeDecoder(Decoding):
    """Generates exactly as the target alone would, only faster.

    Greedy output equals the target's greedy output; sampled output follows the target's processed
    law. The decoder holds no request's state, so threads may share it. It puts the target into
    evaluation mode, and the drafter onto the target's device and dtype.

    It is a decoding method of Hugging Face, too: `target.generate(..., custom_generate=decoder)`.

    Memory: a request's caches are allocated once, for its prompt, all its new tokens and one tree,
    at `bytes_per_token` each; they are freed when it ends or its stream is closed.

    Args:
        target: any decoder-only Hugging Face causal LM; its weights are never changed.
        drafter: a drafter trained for it, or one that needs no training (`AdedDrafter`,
            `LookupDrafter`, `SmallLMDrafter`), or None for plain decoding.
        tokenizer: for text prompts and text output; by default the one in the place of the target
            that the drafter names, if it is there.
        beside: a drafter that shares the nodes of every tree with a trained one or a small model:
            `AdedDrafter` or `LookupDrafter` (see `inference.drafters.combined.drafter`).
        sharing: `CombinedSettings` of how these two share them.
        tree: how draft trees grow, one shape or a plan for greedy and random decoding; by default
            of the schedule that the drafter was trained for. With "auto" every round chooses its
            tree, or none, by what pays on this machine (see `inference.autotune.online`).
        compiled: compile decoding steps and the drafter with `torch.compile`; the first steps take
            long.

    Raises:
        TargetMismatch: drafter or tokenizer belong to another target.
        TargetNotSupported: the target cannot be verified over a tree.
        ConfigError: the tree asks for more than the drafter has.
    """

    @classmethod
    def from_pretrained(
        cls,
        drafter: str | Path,
        target: str | Path | None = None,
        tree: TreeShape | TreePlan | Literal["auto"] | None = None,
        *,
        sharing: CombinedSettings | None = None,
        compiled: bool = False,
        **load: Any,
    ) -> "SpeculativeDecoder":
        """Load a drafter, and the target and tokenizer that it was trained for.

        Args:
            drafter: folder or hub name of the drafter; or `aded`, `aded=TABLE`, `lookup` or
                `lm=MODEL` (a smaller model), which need no training but a target; or two that share
                trees, `aded+drafter=DRAFTER`, `lookup+lm=MODEL` and so on.
            target: where the target is now, if not where the drafter's config says.
            tree: see the class.
            sharing: see the class.
            compiled: see the class.
            **load: for `AutoModelForCausalLM.from_pretrained`, such as dtype or device_map.

        Raises:
            CheckpointError: drafter or target cannot be loaded.
            ConfigError: the drafter names no target, and none is given.
            TargetMismatch: the target or its tokenizer is not the one of the drafter.
        """
        parts = load_parts(drafter, target, **load)
        return cls(
            parts.target,
            parts.drafter,
            parts.tokenizer,
            tree,
            beside=parts.beside,
            sharing=sharing,
            compiled=compiled,
        )

    def generate(
        self,
        prompt: Prompt,
        *,
        temperature: float | None = None,
        seed: int | None = None,
        log_probs: bool = False,
        streamer: BaseStreamer | None = None,
        conversation: Conversation | None = None,
        **generation: Any,
    ) -> GenerateOutput:
        """Return the continuation of a prompt.

        Args:
            prompt: text, chat messages, or token ids.
            temperature: 0 is greedy, more samples; by default as the target's own generation
                config says.
            seed: key of every random number; the same seed gives the same output. By default drawn
                from torch's own generator. Where a drafter or `tree="auto"` learns from request to
                request, the numbers also depend on how many came before, for what some have taught
                must not be judged by the same. A drafter that learns then gives the same requests
                in the same order the same output, after `reset()` once more; trees that follow
                measured times may draw others.
            log_probs: note the new tokens' log-probabilities under the target's processed law.
            streamer: is given the prompt's ids and then new ones as soon as they are certain.
            conversation: of which this is a turn: what it has read already is not read again.
            **generation: `GenerationConfig` fields (max_new_tokens, top_k, top_p, ...) and other
                arguments of `target.generate()`; defaults are those of `target.generate()`.

        Raises:
            PromptError: the prompt or an argument cannot be used.
            NumericalError: the target's logits are not finite.
        """
        requests, config = self._requests([prompt], temperature, seed, generation)
        record = record_for(config, log_probs)
        if conversation is None:
            return self._finished(self._run(requests, record), streamer)[0]
        arguments = {**self._parts(), "record": record}
        with conversation.turn(requests[0], **arguments) as run:
            return self._finished(run, streamer)[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt] | Int[Tensor, "batch width"],
        *,
        attention_mask: Int[Tensor, "batch width"] | None = None,
        temperature: float | None = None,
        seed: int | Sequence[int] | None = None,
        log_probs: bool = False,
        **generation: Any,
    ) -> list[GenerateOutput]:
        """Return the continuations of several prompts, decoded together.

        Each is what `generate` returns for its prompt alone; those that end free their place. Where
        rows share what a drafter learns, each follows the same law as alone, but other draws.

        Args:
            prompts: texts, messages or lists of ids of any lengths, or a padded tensor.
            attention_mask: 0 where the tensor is padding.
            temperature: as for `generate`.
            seed: as for `generate`; each row draws its own numbers. Or one for each prompt, which
                then draws what it would draw alone.
            log_probs: as for `generate`.
            **generation: as for `generate`.

        Raises:
            PromptError: a prompt or an argument cannot be used.
            NumericalError: the target's logits are not finite.
        """
        if isinstance(prompts, str):
            raise PromptError("one prompt where several are expected", remedy="use generate()")
        several: Sequence[Prompt]
        if isinstance(prompts, Tensor):
            several = list(unpadded(prompts, attention_mask))
        else:
            several = prompts
        if not several:
            return []
        requests, config = self._requests(several, temperature, seed, generation)
        return self._finished(self._run(requests, record_for(config, log_probs)))

    def stream(
        self,
        prompt: Prompt,
        *,
        temperature: float | None = None,
        seed: int | None = None,
        **generation: Any,
    ) -> Iterator[str]:
        """Yield the continuation's text as soon as it is certain; arguments as for `generate`.

        Raises:
            PromptError: as for `generate`, or the decoder has no tokenizer.
        """
        requests, _ = self._requests([prompt], temperature, seed, generation)
        if self.tokenizer is None:
            raise PromptError("streaming text needs a tokenizer", remedy="pass tokenizer=")
        return pieces(self._watched(self._run(requests)), TextStream(self.tokenizer))

    def steps(
        self,
        prompt: Prompt,
        *,
        temperature: float | None = None,
        seed: int | None = None,
        **generation: Any,
    ) -> Iterator[DecodeStep]:
        """Yield tokens in the groups that became certain together; arguments as for `generate`."""
        run = self.start([prompt], temperature=temperature, seed=seed, **generation)
        return self._watched(run)

    def __call__(
        self,
        model: CausalLM,
        input_ids: Int[Tensor, "batch width"],
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        streamer: BaseStreamer | None = None,
        seed: int | None = None,
        **inputs: Any,
    ) -> Int[Tensor, "batch tokens"] | GenerateDecoderOnlyOutput:
        """Decode what `target.generate(..., custom_generate=decoder)` has prepared.

        `generate()` does not hand its own `streamer` on to a decoding method; use
        `custom_generate=functools.partial(decoder, streamer=streamer)`.

        Raises:
            PromptError: the config asks for another kind of decoding (beams, ...).
            TargetMismatch: the model is not the decoder's target.
        """
        # No argument of its own for the mask: generate() would hand it over twice.
        mask = inputs.pop("attention_mask", None)
        handover = Handover(
            model, input_ids, mask, logits_processor, stopping_criteria, generation_config
        )
        requests = self._numbered(handover.requests(self.target, seed, inputs))
        run = self._run(requests, record_for(generation_config, log_probs=False))
        return in_transformers_form(
            self._finished(run, streamer),
            input_ids,
            handover.pad_token_id,
            as_dict=bool(generation_config.return_dict_in_generate),
        )

    def _finished(
        self, run: DecodeRun, streamer: BaseStreamer | None = None
    ) -> list[GenerateOutput]:
        steps = [one for several in feed(run, streamer) for one in several]
        self._watch.add(run)
        texts = [self._decode(one.new_token_ids) for one in run.sequences]
        return outputs_of(run, steps, texts)

    def _watched(self, run: DecodeRun) -> Iterator[DecodeStep]:
        """Yield the rounds of a single request; closing the iterator frees the caches at once."""
        with closing(iter(run)) as steps:
            for (one,) in steps:
                yield one
        self._watch.add(run)
