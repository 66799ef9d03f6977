"""Verification of a running server against the target, which the same process runs."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.client.answer import ServerAnswer
from inference.client.client import ServerClient
from inference.client.patience import ask_patiently
from inference.client.request import ServerRequest, prompt_for
from inference.generation.prompts import Prompt, encode_prompt
from inference.losslessness.records import DISTRIBUTION_TESTS, FALSE_ALARM
from inference.losslessness.reference import Reference
from inference.losslessness.server.greedy import compare_greedy
from inference.losslessness.server.records import (
    ServerCheck,
    ServerReport,
    ServerVerifySettings,
)
from inference.losslessness.server.sampled import (
    ask_all,
    check_samples,
    check_seeds,
    names_tokens,
    refused,
)
from jakiro.errors import PromptError
from jakiro.target.checks import CausalLM
from jakiro.utils.dtype_names import dtype_name
from jakiro.utils.tracking import Track, untracked

# Fields that some servers refuse, with a sentence about what cannot be checked without them.
_OPTIONAL = {
    "top_k": "",
    "logprobs": "the server does not name the tokens of its texts, so only the first token of each "
    "sampled text was compared, which drafts do not affect",
    "seed": "the server accepts no seeds, so it was not checked whether the same seed gives the "
    "same text",
}
_BAD_FIELD = (400, 422)  # statuses


async def verify_server(
    client: ServerClient,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: ServerVerifySettings | None = None,
    on_check: Callable[[ServerCheck], None] = lambda _: None,
    track: Track = untracked,
) -> ServerReport:
    """Return a report on whether a server's greedy and sampled texts are those of its target.

    The server may be any that has OpenAI's interface. What cannot be checked through its
    interface is noted in the report.

    Args:
        client: client that is connected to the server.
        model: the target that the server should serve.
        tokenizer: tokenizer of the target.
        prompts: texts, lists of chat messages, or token ids.
        settings: settings of the verification; None for the defaults.
        on_check: function that is called after each check.
        track: function that receives the parts of the verification, to show progress.

    Raises:
        PromptError: there is no prompt, or a prompt cannot be used.
        ResourceError: the server does not answer, or its tokens are not those of the target.
    """
    settings = settings or ServerVerifySettings()
    if not prompts:
        raise PromptError(
            "there are no prompts to verify with", expected="at least one prompt", got=0
        )
    verification = _Verification(client, model, tokenizer, prompts, settings, on_check, track)
    return await verification.run()


class _Interface(NamedTuple):
    """The fields that a server accepts, and whether it names the tokens of its texts."""

    accepted: frozenset[str]
    names_tokens: bool


class _Verification:
    """The checks of one server; the arguments are those of `verify_server`."""

    def __init__(
        self,
        client: ServerClient,
        model: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Prompt],
        settings: ServerVerifySettings,
        on_check: Callable[[ServerCheck], None],
        track: Track,
    ) -> None:
        self._client = client
        self._model = model
        self._tokenizer = tokenizer
        self._settings = _explicit(settings, is_own=client.model.is_own)
        self._on_check = on_check
        self._track = track
        config: Any = model.config
        self._vocab_size = int(config.get_text_config().vocab_size)
        self._prompts = [
            prompt_for(prompt, as_chat=settings.chat) for prompt in prompts[: settings.num_prompts]
        ]
        self._encoded = [
            encode_prompt(prompt, tokenizer, self._vocab_size)  # type: ignore[arg-type]
            for prompt in self._prompts
        ]
        self._checks: list[ServerCheck] = []
        self._notes: list[str] = []
        self._fingerprints: set[str] = set()

    async def run(self) -> ServerReport:
        """Run all checks."""
        await self._check_greedy()
        if self._settings.sampled_prompts:
            interface = await self._interface()
            for number in range(1, self._num_sampled + 1):
                await self._check_sampled(number, interface)
        if all(check.drafted is None for check in self._checks):
            self._notes.append(
                "the server does not report how many drafts were accepted, so it is not known "
                "whether the checks concern drafts"
            )
        return ServerReport(
            url=self._client.url,
            model=self._client.model.name,
            system_fingerprints=tuple(sorted(self._fingerprints)),
            target=self._model.name_or_path,
            dtype=dtype_name(self._model.dtype),
            settings=self._settings,
            checks=tuple(self._checks),
            notes=tuple(self._notes),
        )

    @property
    def _num_sampled(self) -> int:
        return min(self._settings.sampled_prompts, len(self._prompts))

    async def _check_greedy(self) -> None:
        """Compare greedy texts, of which every other one is streamed."""
        settings = self._settings
        requests = [
            ServerRequest(
                prompt=prompt,
                max_tokens=settings.max_new_tokens,
                temperature=0.0,
                is_streamed=number % 2 == 0,
            )
            for number, prompt in enumerate(self._prompts)
        ]
        answers = await self._ask("greedy texts", requests)
        references = [Reference(self._model, ids) for ids in self._encoded]
        self._note_lengths(answers)
        self._add(compare_greedy(references, answers, self._tokenizer, settings.max_new_tokens))

    async def _check_sampled(self, number: int, interface: _Interface) -> None:
        settings = self._settings
        requests = [
            self._sample_request(number - 1, index, interface) for index in range(settings.samples)
        ]
        answers = await self._ask(f"samples of prompt {number}", requests)
        if "seed" in interface.accepted:
            seeds = await check_seeds(self._client, requests, answers, settings.concurrency)
            self._add(seeds)
        threshold = FALSE_ALARM / (DISTRIBUTION_TESTS * self._num_sampled)
        found = check_samples(
            self._model,
            self._tokenizer,
            self._encoded[number - 1],
            answers,
            settings,
            number,
            threshold,
        )
        for check in found:
            self._add(check)

    async def _interface(self) -> _Interface:
        """Return the fields that the server accepts, which are found by trying.

        Raises:
            ResourceError: the server does not even accept a request without these fields.
        """
        accepted = list(_OPTIONAL)
        while True:
            interface = _Interface(frozenset(accepted), names_tokens=True)
            request = self._sample_request(0, 0, interface)
            answer = await ask_patiently(self._client, request, Random(0))
            if answer.error is None:
                break
            # Without a top_k that was chosen, the distribution would be a different one.
            fixed = ["top_k"] if self._settings.top_k else []
            others = [field for field in accepted if field not in fixed]
            if answer.status not in _BAD_FIELD or not others:
                raise refused(self._client, answer)
            named = [field for field in others if field in answer.error]
            accepted.remove((named or others)[0])
        has_names = "logprobs" in accepted and names_tokens([answer])
        missing = [field for field in _OPTIONAL if field not in accepted]
        if not has_names and "logprobs" not in missing:
            missing.append("logprobs")
        self._notes += [_OPTIONAL[field] for field in missing if _OPTIONAL[field]]
        return _Interface(frozenset(accepted), has_names)

    def _sample_request(self, prompt: int, index: int, interface: _Interface) -> ServerRequest:
        settings = self._settings
        seed = settings.seed * settings.samples + index
        return ServerRequest(
            prompt=self._prompts[prompt],
            max_tokens=settings.length if interface.names_tokens else 1,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=seed if "seed" in interface.accepted else None,
            is_streamed=False,
            has_log_probs=interface.names_tokens and "logprobs" in interface.accepted,
            others=self._top_k() if "top_k" in interface.accepted else {},
        )

    def _top_k(self) -> dict[str, Any]:
        top_k = self._settings.top_k
        if top_k is None:
            return {}
        if self._client.model.is_own:
            return {"jakiro": {"top_k": top_k or self._vocab_size}}
        return {"top_k": top_k}

    async def _ask(self, what: str, requests: Sequence[ServerRequest]) -> list[ServerAnswer]:
        advance = self._track(what, len(requests))
        answers = await ask_all(self._client, requests, self._settings.concurrency, advance)
        self._fingerprints |= {
            answer.system_fingerprint for answer in answers if answer.system_fingerprint
        }
        return answers

    def _note_lengths(self, answers: Sequence[ServerAnswer]) -> None:
        """Note the first prompt for which the server counts a different number of tokens."""
        for number, (ids, answer) in enumerate(zip(self._encoded, answers, strict=True), start=1):
            if answer.usage is not None and answer.usage.prompt != len(ids):
                self._notes.append(
                    f"prompt {number} has {len(ids)} tokens here, but the server counts "
                    f"{answer.usage.prompt}: its tokenizer or chat template may be a different one"
                )
                return

    def _add(self, check: ServerCheck) -> None:
        self._checks.append(check)
        self._on_check(check)


def _explicit(settings: ServerVerifySettings, *, is_own: bool) -> ServerVerifySettings:
    """Return settings without defaults of transformers, which other servers do not have."""
    if is_own:
        return settings
    explicit = {"top_p": settings.top_p or 1.0, "top_k": settings.top_k or 0}
    return settings.model_copy(update=explicit)
