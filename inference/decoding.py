"""What every way to call a decoder goes through: its parts, its requests, and their runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from transformers import GenerationConfig, PreTrainedTokenizerBase

from inference.auto_tree import AutoTree
from inference.costs import known_costs
from inference.details import Record, record_for
from inference.drafters.aded import AdedDrafter
from inference.drafters.combined import CombinedDrafter
from inference.drafters.combined_knowledge import CombinedSettings
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained import TrainedDrafter
from inference.engine import DecodeRun
from inference.limits import refuse_arguments
from inference.loading import tokenizer_at
from inference.policy import AlwaysDraft, DraftPolicy
from inference.preparation import prepare_requests
from inference.prompts import Prompt, encode_prompt
from inference.protocol import Drafter
from inference.request import Request
from inference.tau_watch import TauWatch
from inference.tree_plans import default_tree, largest_trees
from inference.tree_shape import TreePlan, TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target import TargetAdapter, compile_mode
from jakiro.target_checks import CausalLM
from jakiro.target_record import check_target, check_tokenizer

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
        turns = self.policy.turns
        if self.drafter is not None and self.drafter.turns is not None:
            turns = self.drafter.turns
        if turns is None:
            return requests
        turn = turns.take()
        return [
            replace(one, sampling=replace(one.sampling, turn=turn.number), turn=turn)
            for one in requests
        ]

    def _run(self, requests: list[Request], record: Record | None = None) -> DecodeRun:
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
