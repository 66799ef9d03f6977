"""The public decoder, which combines an unmodified Hugging Face causal LM with a drafter."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

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

from inference.autotune.policy import RequestGroup, numbered, policy_for
from inference.autotune.setup import Pair, refuse_unusable, set_up_drafter, set_up_target
from inference.autotune.threads import Threads
from inference.conversation import Conversation
from inference.engine.decode_step import DecodeStep, options_for
from inference.engine.loop import DecodeRun
from inference.generation.custom_generate import pad_token_id, requests_of
from inference.generation.preparation import Handover, prepare_requests
from inference.generation.prompts import (
    Prompt,
    encode_prompt,
    needed,
    refuse_single,
    single_prompt,
    unpadded,
)
from inference.generation.streaming import feed, pieces_by_depth, streamer_of_generate
from inference.outputs import GenerateOutput, in_transformers_form, outputs_of
from inference.protocol import AdaptiveDrafter, Drafter
from inference.trees.shape import Trees
from jakiro.drafter import JakiroDrafter
from jakiro.errors import PromptError
from jakiro.target.checks import CausalLM
from jakiro.utils.pretrained import local_tokenizer


class SpeculativeDecoder:
    """A lossless decoder that computes the target's output in fewer forward passes of the target.

    Greedy output equals the target's greedy output; sampled output has the target's processed
    distribution. Threads may share a decoder, which stores no request state. It puts the target
    into evaluation mode, and moves a trained drafter to the target's device and dtype.

    A decoder is also a decoding method of transformers:
    `target.generate(..., custom_generate=decoder)`.

    The caches of a request are allocated once, with room for its prompt, all its new tokens and one
    tree, at `bytes_per_token` bytes per token. They are freed when the request ends or its stream
    is closed.

    Args:
        target: decoder-only Hugging Face causal LM, whose weights are never changed.
        drafter: trained drafter, any other `Drafter`, such as `LookupDrafter`, or a `Pair`; None
            for autoregressive decoding.
        tokenizer: for text prompts and text output; None for that of the target that a trained
            drafter's config names, if there is a local copy.
        tree: "auto" to select in every step the tree that is expected to be fastest, or none;
            "fixed" for trees as in training, or a shape or a plan (only for trained drafters).
        compiled: whether steps and a trained drafter are compiled with `torch.compile`.
        threads: number of threads of decoding steps on a CPU; "auto" for the fastest, which may
            change while other processes are busy; None for torch's current number.
        other_weights: whether a trained drafter may be used with other weights of the same
            architecture and tokenizer, such as those before a quantization.
        batch_invariant: whether logits do not depend on what is computed together, bit for bit
            (half precision on a CPU only). Steps take longer.
        captured: whether a step starts before the host has read the previous one, as a CUDA graph
            on a GPU. Experimental; steps that need the host are decoded as usual.

    Raises:
        TargetMismatch: the drafter or the tokenizer belongs to a target other than the given one.
        TargetNotSupported: the target cannot verify a tree, or cannot compute as requested.
        ConfigError: the drafter cannot draft trees of the given shape, or two arguments cannot be
            combined.

    Example:
        decoder = SpeculativeDecoder(target, LookupDrafter(), tokenizer)
        output = decoder.generate("def main(", max_new_tokens=32, temperature=0)
        print(output.text, output.stats.tau)
    """

    def __init__(
        self,
        target: CausalLM,
        drafter: JakiroDrafter | Drafter | Pair | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        tree: Trees = "auto",
        *,
        compiled: bool = False,
        threads: Threads = None,
        other_weights: bool = False,
        batch_invariant: bool = False,
        captured: bool = False,
    ) -> None:
        refuse_unusable(tree)
        self.target, self.threads = set_up_target(
            target,
            threads,
            compiled=compiled,
            batch_invariant=batch_invariant,
            captured=captured,
            drafter=drafter,
            other_weights=other_weights,
        )
        if isinstance(drafter, JakiroDrafter) and tokenizer is None:
            tokenizer = local_tokenizer(drafter.config.target_record.name_or_path)
        self.tokenizer = tokenizer
        self.drafter: Drafter | None = None
        if drafter is not None:
            self.drafter = set_up_drafter(
                drafter,
                self.target,
                tokenizer,
                tree,
                compiled=compiled,
                other_weights=other_weights,
                threads=self.threads,
            )
        adapts = threads == "auto" and not captured
        self.policy = policy_for(self.target, self.drafter, tree, self.threads, adapts=adapts)
        self._pool = None
        if captured:
            from inference.engine.captured import CapturedPool

            self._pool = CapturedPool()

    @classmethod
    def from_pretrained(
        cls,
        drafter: str | Path,
        target: str | Path | None = None,
        tree: Trees = "auto",
        *,
        compiled: bool = False,
        threads: Threads = "auto",
        other_weights: bool = False,
        batch_invariant: bool = False,
        captured: bool = False,
        **load: Any,
    ) -> "SpeculativeDecoder":
        """Return a decoder with a loaded drafter, its target and the target's tokenizer.

        All other arguments are those of the class. If there are two drafters, they apply to the
        trained one.

        Args:
            drafter: folder or hub id of a trained drafter; `aded`, `aded=TABLE`, `lookup` or
                `lm=MODEL`, which require `target`; or a pair, such as `lookup+drafter=DRAFTER`.
            target: folder or hub id; None for the target named in the drafter's config.
            **load: arguments of `AutoModelForCausalLM.from_pretrained`, such as dtype or
                device_map.

        Raises:
            CheckpointError: the drafter, the target or the tokenizer cannot be loaded.
            ConfigError: `target` is None, but the drafter does not name a target; or as for the
                class.
        """
        from inference.loading import load_parts  # each kind of drafter is optional

        return cls(
            *load_parts(drafter, target, **load),
            tree,
            compiled=compiled,
            threads=threads,
            other_weights=other_weights,
            batch_invariant=batch_invariant,
            captured=captured,
        )

    @property
    def is_captured(self) -> bool:
        return self._pool is not None

    @property
    def bytes_per_token(self) -> int:
        """The number of bytes per token in the caches of target and drafter."""
        if self.drafter is None:
            return self.target.new_cache(1, 1).bytes_per_token
        cache = self.target.new_cache(1, 1, self.drafter.hidden_states)
        return cache.bytes_per_token + self.drafter.bytes_per_token

    def generate(
        self,
        prompt: Prompt | Mapping[str, Any] | None = None,
        *,
        temperature: float | int | None = None,
        seed: int | None = None,
        log_probs: bool = False,
        streamer: BaseStreamer | None = None,
        conversation: Conversation | None = None,
        **generation: Any,
    ) -> GenerateOutput:
        """Return the continuation of a prompt.

        Args:
            prompt: text, chat messages, token ids, or what a tokenizer returned, which may also be
                passed as in `generate(**tokenizer(text))`.
            temperature: 0 for greedy decoding; None for the target's generation config.
            seed: the same seed gives the same output, with trees of a fixed size (if the drafter
                learns, after the same requests since `reset()`); None for a seed from torch.
            log_probs: whether to return the new tokens' log-probabilities under the target's
                processed distribution.
            streamer: gets the prompt's ids, then new tokens as they are emitted.
            conversation: conversation that the prompt continues; cached tokens of earlier turns
                are not processed again.
            **generation: `GenerationConfig` fields (max_new_tokens, top_k, top_p, ...) and other
                arguments of `target.generate()`, with the same defaults; and `grammar`, which the
                text follows: a JSON schema, a pydantic class, a regular expression that
                `re.compile` returned, or a text in llguidance's variant of Lark.

        Raises:
            PromptError: the prompt or an argument cannot be used.
            NumericalError: the target's logits are not finite, or processors leave no token.
            DraftError: the drafter proposed a candidate that cannot be verified.
        """
        group = self._group([single_prompt(prompt, generation)], temperature, seed, generation)
        with self._opened(group, log_probs, conversation) as run:
            return self._ended(run, streamer)[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt] | Int[Tensor, "batch width"],
        *,
        attention_mask: Int[Tensor, "batch width"] | None = None,
        temperature: float | int | None = None,
        seed: int | Sequence[int] | None = None,
        log_probs: bool = False,
        **generation: Any,
    ) -> list[GenerateOutput]:
        """Return the continuations of several prompts, decoded together; otherwise as `generate`.

        The output for each prompt is the same as in a batch of one with the same random numbers,
        up to rounding. With an adaptive drafter, only the distribution of the output is the same.

        Args:
            prompts: texts, chat messages or lists of token ids; or a padded tensor of token ids.
            attention_mask: 1 for tokens and 0 for padding; None if there is no padding.
            seed: one seed, from which each prompt gets other random numbers; or a list with a seed
                for each prompt, which then gets the same random numbers as alone.
        """
        refuse_single(prompts)
        if isinstance(prompts, Tensor):
            prompts = list(unpadded(prompts, attention_mask))
        if not prompts:
            return []
        group = self._group(prompts, temperature, seed, generation)
        return self._ended(self._run(group, log_probs))

    def stream(
        self,
        prompt: Prompt,
        *,
        temperature: float | int | None = None,
        seed: int | None = None,
        **generation: Any,
    ) -> Iterator[str]:
        """Yield the text of the continuation piece by piece; otherwise as `generate`."""
        tokenizer = needed(self.tokenizer)
        group = self._group([prompt], temperature, seed, generation)
        steps = self._steps(self._opened(group))
        tokens = (pair for step in steps for pair in zip(step.token_ids, step.depths, strict=True))
        return (piece.text for piece in pieces_by_depth(tokens, tokenizer))

    def steps(
        self,
        prompt: Prompt,
        *,
        temperature: float | int | None = None,
        seed: int | None = None,
        conversation: Conversation | None = None,
        **generation: Any,
    ) -> Generator[DecodeStep, None, None]:
        """Yield the decoding steps that continue a prompt; otherwise as `generate`.

        Closing the generator ends decoding early. In a conversation, the tokens so far are then
        cached, as at the end of a complete answer.
        """
        group = self._group([prompt], temperature, seed, generation)
        return self._steps(self._opened(group, conversation=conversation))

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
        """Decode the prompts of `target.generate(..., custom_generate=decoder)`.

        Raises:
            PromptError: the arguments request something that is not supported, such as beam
                search; a prompt cannot be used; or there are several sequences and a streamer.
            TargetMismatch: the model is not the decoder's target.
        """
        # The mask is not a named argument, because generate() would pass it twice.
        handover = Handover(
            model, input_ids, logits_processor, stopping_criteria, generation_config
        )
        requests = requests_of(handover, self.target, seed, inputs)
        group = numbered(
            requests, generation_config, self.drafter, self.policy, is_seeded=seed is not None
        )
        run = self._run(group)
        has_prompt = streamer is None
        streamer = streamer or streamer_of_generate()
        return in_transformers_form(
            self._ended(run, streamer, has_prompt=has_prompt),
            input_ids,
            pad_token_id(generation_config),
            as_dict=bool(generation_config.return_dict_in_generate),
        )

    def start(
        self,
        prompts: Sequence[Prompt],
        *,
        temperature: float | int | None = None,
        seed: int | Sequence[int] | None = None,
        **generation: Any,
    ) -> DecodeRun:
        """Return a run that decodes several prompts together; otherwise as `generate_batch`.

        Decoding begins when the run is iterated over; iteration yields the decoding steps. The
        run's `stats` can be read at any time. More prompts may join the run; see `admit`.
        """
        refuse_single(prompts)
        group = self._group(prompts, temperature, seed, generation)
        return self._run(group)

    def admit(
        self,
        run: DecodeRun,
        prompts: Sequence[Prompt],
        *,
        temperature: float | int | None = None,
        seed: int | Sequence[int] | None = None,
        **generation: Any,
    ) -> list[int]:
        """Add prompts to a run of this decoder, and return their indices in the run.

        The prompts are read in chunks between the decoding steps of the other sequences. The
        sampling options may differ from those of the run, unless the drafter has trees of another
        shape for them, as trained drafters have for greedy decoding and for sampling. The run's
        options determine which scores and log-probabilities are returned. If decoding a sequence
        raises an error, the whole run ends.

        Raises:
            PromptError: a prompt or an argument cannot be used; the run was started by another
                decoder, or is closed; or the drafter's trees differ in shape from those of the run.
        """
        if run.target is not self.target or run.drafter is not self.drafter:
            raise PromptError(
                "the run was started by another decoder",
                expected="a run from start() of this decoder",
                got="a run with another target or drafter",
            )
        refuse_single(prompts)
        if not prompts:
            return []
        return run.admit(self._group(prompts, temperature, seed, generation, run).requests)

    def reset(self, *, trees: bool = True) -> None:
        """Discard what was learned from earlier requests about texts and, if `trees`, about trees.

        With an adaptive drafter, the same requests with the same seeds give the same tokens after
        every reset, unless other requests are being decoded during the reset: the drafter still
        learns from those, and the numbering of requests does not start again from 0.
        """
        if trees:
            self.policy.reset()
        if isinstance(self.drafter, AdaptiveDrafter):
            self.drafter.reset()

    def _group(
        self,
        prompts: Sequence[Prompt],
        temperature: float | int | None,
        seed: int | Sequence[int] | None,
        generation: dict[str, Any],
        run: DecodeRun | None = None,
    ) -> RequestGroup:
        spec = self.target.spec
        requests, config = prepare_requests(
            self.target.model,
            [encode_prompt(prompt, self.tokenizer, spec.vocab_size) for prompt in prompts],
            generation,
            temperature=temperature,
            seed=seed,
            max_position=spec.max_position,
            tokenizer=self.tokenizer,
            # Random numbers that no sequence of the run uses.
            first_row=0 if run is None else len(run.sequences),
        )
        if run is not None:  # its trees do not depend on the seeds of later requests
            return numbered(requests, config, self.drafter, run.draft_policy, is_seeded=False)
        return numbered(requests, config, self.drafter, self.policy, is_seeded=seed is not None)

    def _parts(self, group: RequestGroup, log_probs: bool) -> dict[str, Any]:
        return {
            "target": self.target,
            "drafter": self.drafter,
            "policy": group.policy,
            "record": options_for(group.config, log_probs),
            "threads": self.threads,
        }

    def _run(self, group: RequestGroup, log_probs: bool = False) -> DecodeRun:
        parts = self._parts(group, log_probs)
        return DecodeRun(requests=group.requests, pool=self._pool, **parts)

    def _opened(
        self,
        group: RequestGroup,
        log_probs: bool = False,
        conversation: Conversation | None = None,
    ) -> AbstractContextManager[DecodeRun]:
        """Return the run of a single request, which is a turn of a conversation if there is one."""
        if conversation is None:
            return nullcontext(self._run(group, log_probs))
        return conversation.turn(group.requests[0], **self._parts(group, log_probs))

    def _ended(
        self, run: DecodeRun, streamer: BaseStreamer | None = None, *, has_prompt: bool = False
    ) -> list[GenerateOutput]:
        fed = feed(run, streamer, has_prompt=has_prompt)
        steps = [step for together in fed for step in together]
        return outputs_of(run, steps, self.tokenizer)

    def _steps(
        self, opened: AbstractContextManager[DecodeRun]
    ) -> Generator[DecodeStep, None, None]:
        """Yield the steps of a single request.

        Closing the generator frees the caches at once, and leaves a conversation usable.
        """
        with opened as run, closing(iter(run)) as steps:
            for (step,) in steps:
                yield step
