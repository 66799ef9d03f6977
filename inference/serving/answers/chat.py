"""Chat completions: messages that the target's chat template turns into a prompt."""

from inference.serving.answers.answer import AnswerForm, Data
from inference.serving.answers.reply import TextDelta
from inference.serving.answers.schema import ChatBody
from inference.serving.answers.token_text import bytes_of_token, text_of_token


class ChatForm(AnswerForm):
    """The form of the answers of `/v1/chat/completions`."""

    body = ChatBody
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, delta: TextDelta) -> Data:
        """Return a choice with its message."""
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._log_probs(delta),
            "finish_reason": delta.finish_reason,
        }

    def heads(self, numbers: range) -> list[Data]:
        """Return the role of each choice."""
        head = {"role": "assistant", "content": ""}
        return [
            {"index": number, "delta": head, "logprobs": None, "finish_reason": None}
            for number in numbers
        ]

    def parts(self, delta: TextDelta) -> list[Data]:
        """Return a choice for new text, and another one for the end."""
        empty: Data = {"index": delta.index, "delta": {}, "logprobs": None, "finish_reason": None}
        parts = []
        if delta.text or delta.tokens:
            log_probs = self._log_probs(delta)
            parts.append({**empty, "delta": {"content": delta.text}, "logprobs": log_probs})
        if delta.finish_reason is not None:
            parts.append({**empty, "finish_reason": delta.finish_reason})
        return parts

    def _log_probs(self, delta: TextDelta) -> Data | None:
        if not self.has_log_probs:
            return None
        content = [
            {
                **self._token(token.token_id, token.log_prob),
                "top_logprobs": [self._token(*pair) for pair in token.likeliest],
            }
            for token in delta.tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, log_prob: float) -> Data:
        return {
            "token": text_of_token(self.tokenizer, token_id),
            "logprob": log_prob,
            "bytes": bytes_of_token(self.tokenizer, token_id),
        }
