"""The token ids that belong to the names of tokens in a server's log-probabilities."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from inference.losslessness.reference import Reference, Tokens
from jakiro.target.checks import CausalLM


class TokenNames:
    """Groups of tokens that have the same name in a server's answers.

    Most tokens are alone in their group. Each group is represented by one of its tokens, and all
    tokens that end a text form a group.

    Args:
        tokenizer: the target's tokenizer.
        vocab_size: number of tokens in the target's vocabulary.
        eos_ids: tokens that end a text.
        special: whether special tokens have names; if not, their text is empty.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_ids: Collection[int],
        *,
        special: bool,
    ) -> None:
        known = min(len(tokenizer), vocab_size)
        texts = tokenizer.batch_decode(
            [[token] for token in range(known)], skip_special_tokens=not special
        )
        end = min(eos_ids, default=-1)  # stands for all tokens that end a text
        self.end = end if eos_ids else None
        self.representatives = torch.arange(vocab_size)
        # The ends of texts come first, so that other tokens with the same name join them.
        self._ids = {texts[token]: end for token in eos_ids if token < known}
        for token in range(vocab_size):
            name = texts[token] if token < known else ""
            own = end if token in eos_ids else self._ids.setdefault(name, token)
            self.representatives[token] = own
        counts = self.representatives.bincount().tolist()
        # Groups of several tokens, except the ends of texts.
        self.shared = {token for token, count in enumerate(counts) if count > 1} - {end}

    def token_of(self, name: str) -> int | None:
        """Return the representative of the tokens with a name; None for an unknown name."""
        return self._ids.get(name)


class NamedReference(Reference):
    """A target's distributions over groups of tokens with the same name.

    The probability of a group is that of its representative, and the other tokens have probability
    zero. A group of several tokens ends a continuation, because it is not known which of them the
    server has chosen.

    Args:
        model: the target.
        prompt_ids: token ids of the prompt.
        sampling: arguments of `generate()` that process the distribution.
        names: groups of tokens.
    """

    def __init__(
        self,
        model: CausalLM,
        prompt_ids: Sequence[int],
        sampling: dict[str, Any],
        names: TokenNames,
    ) -> None:
        super().__init__(model, prompt_ids, sampling)
        self.names = names
        self._shared = names.shared

    def distributions(
        self, prefixes: Sequence[Tokens]
    ) -> Iterator[tuple[Tokens, Float[Tensor, " vocab"]]]:
        """Yield each prefix, and the distribution of the group of the next token."""
        for prefix, probs in super().distributions(prefixes):
            groups = self.names.representatives.to(probs.device)
            yield prefix, torch.zeros_like(probs).index_add_(0, groups, probs)

    def ends(self, token: int) -> bool:
        """Return whether a continuation has no known token after this one."""
        return token in self._shared or super().ends(token)
