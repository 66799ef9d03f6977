"""Completions: prompts that are continued as they are."""

from functools import partial

from inference.serving.answers.answer import AnswerForm, Data
from inference.serving.answers.reply import TextDelta
from inference.serving.answers.schema import CompletionBody
from inference.serving.answers.token_text import text_of_token


class CompletionForm(AnswerForm):
    """The form of the answers of `/v1/completions`."""

    body = CompletionBody
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def choice(self, delta: TextDelta) -> Data:
        """Return a choice with its text."""
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._log_probs(delta) if self.has_log_probs else None,
            "finish_reason": delta.finish_reason,
        }

    def _log_probs(self, delta: TextDelta) -> Data:
        text = partial(text_of_token, self.tokenizer)
        return {
            "tokens": [text(token.token_id) for token in delta.tokens],
            "token_logprobs": [token.log_prob for token in delta.tokens],
            "top_logprobs": [
                # If several tokens have the same text, this form can only contain the likeliest.
                {text(other): log_prob for other, log_prob in reversed(token.likeliest)}
                for token in delta.tokens
            ],
            "text_offset": [token.offset for token in delta.tokens],
        }
