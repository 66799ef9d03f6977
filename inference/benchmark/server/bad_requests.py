"""Requests that every server with OpenAI's interface must refuse."""

import json
from typing import Any, NamedTuple


class BadRequest(NamedTuple):
    """A request with a fault."""

    fault: str  # description of the fault
    path: str
    content: bytes


def bad_requests(model: str) -> list[BadRequest]:
    """Return one request for each kind of fault.

    Args:
        model: name of the served model.
    """
    body: dict[str, Any] = {"model": model, "prompt": "Once", "max_tokens": 4}
    chat: dict[str, Any] = {"model": model, "max_tokens": 4}
    faults: dict[str, tuple[str, Any]] = {
        "no prompt": ("completions", {"model": model}),
        "an unknown model": ("completions", body | {"model": f"not-{model}"}),
        "a negative length": ("completions", body | {"max_tokens": -1}),
        "a temperature that is a text": ("completions", body | {"temperature": "hot"}),
        "messages that are a text": ("chat/completions", chat | {"messages": "Hello"}),
        "a message without a role": ("chat/completions", chat | {"messages": [{"content": "Hi"}]}),
        "an unknown path": ("compositions", body),
    }
    encoded = [
        BadRequest(fault, path, json.dumps(content).encode())
        for fault, (path, content) in faults.items()
    ]
    return [BadRequest("no JSON", "completions", b'{"model": '), *encoded]
