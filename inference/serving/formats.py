"""How the choices of an answer, whole or in chunks, become JSON data."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from inference.serving.details import bytes_of_token, text_of_token
from inference.serving.reply import Reply, TextDelta
from inference.serving.schema import ChatBody, CompletionBody, GenerationBody
from inference.serving.tool_calls import ToolCall, ToolCallParser

Data = dict[str, Any]


class AnswerForm(ABC):
    """The form of an answer.

    Args:
        head: fields of the whole answer, and of each chunk of a stream.
    """

    body: ClassVar[type[GenerationBody]]
    prefix: ClassVar[str]  # of the id
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, body: GenerationBody, num_choices: int, head: Data
    ) -> None:
        self.tokenizer = tokenizer
        self.has_log_probs = body.num_likeliest is not None
        self.has_usage = body.has_usage_chunk or not body.stream
        self.num_choices = num_choices
        self.head = head
        self._has_metrics = body.jakiro.metrics

    @abstractmethod
    def choice(self, delta: TextDelta) -> Data:
        """Return a choice with its text."""

    def end(self, reply: Reply) -> Data:
        """Return the fields that describe a complete reply, where they are asked for."""
        stats = reply.stats
        fields: Data = {}
        if self.has_usage:
            accepted, drafted = stats.accepted.total(), stats.proposed_by_proposer.total()
            prompt, completion = reply.num_prompt_tokens, reply.num_tokens
            fields["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "completion_tokens_details": {
                    "accepted_prediction_tokens": accepted,
                    "rejected_prediction_tokens": drafted - accepted,
                },
            }
        if self._has_metrics:
            fields["metrics"] = {"speculative_decoding": stats.speculative_metrics}
        return fields

    def heads(self) -> list[Data]:
        """Return the choices that precede all text of a stream."""
        return []

    def parts(self, delta: TextDelta) -> list[Data]:
        """Return the choices of a stream's chunks for new text."""
        return [self.choice(delta)]


class CompletionForm(AnswerForm):
    body = CompletionBody
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def choice(self, delta: TextDelta) -> Data:
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


class ChatForm(AnswerForm):
    body = ChatBody
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, body: ChatBody, num_choices: int, head: Data
    ) -> None:
        super().__init__(tokenizer, body, num_choices, head)
        most = None if body.parallel_tool_calls else 1
        self._parsers = [ToolCallParser(body.tool_names, most) for _ in range(num_choices)]
        self._has_tools = bool(body.tool_names)

    def choice(self, delta: TextDelta) -> Data:
        text, calls = self._separated(delta)
        message: Data = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [call.data for call in calls]}
        return {
            "index": delta.index,
            "message": message,
            "logprobs": self._log_probs(delta),
            "finish_reason": self._reason(delta),
        }

    def heads(self) -> list[Data]:
        head = {"role": "assistant", "content": ""}
        return [
            {"index": number, "delta": head, "logprobs": None, "finish_reason": None}
            for number in range(self.num_choices)
        ]

    def parts(self, delta: TextDelta) -> list[Data]:
        """Return a choice for new text, one for complete calls, and another one for the end."""
        empty: Data = {"index": delta.index, "delta": {}, "logprobs": None, "finish_reason": None}
        parts = []
        first = self._parsers[delta.index].num_calls
        text, calls = self._separated(delta)
        if text or delta.tokens:
            log_probs = self._log_probs(delta)
            parts.append({**empty, "delta": {"content": text}, "logprobs": log_probs})
        if calls:
            data = [{"index": index, **call.data} for index, call in enumerate(calls, first)]
            parts.append({**empty, "delta": {"tool_calls": data}})
        if delta.finish_reason is not None:
            parts.append({**empty, "finish_reason": self._reason(delta)})
        return parts

    def _separated(self, delta: TextDelta) -> tuple[str, list[ToolCall]]:
        """Return the new text without calls of tools, and the new calls."""
        if not self._has_tools:
            return delta.text, []
        is_end = delta.finish_reason is not None
        return self._parsers[delta.index].push(delta.text, is_end=is_end)

    def _reason(self, delta: TextDelta) -> str | None:
        has_called = self._parsers[delta.index].num_calls > 0
        return "tool_calls" if has_called and delta.finish_reason == "stop" else delta.finish_reason

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
