"""A client of a server with OpenAI's interface, and what it shares with other clients."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import httpx2

from jakiro.errors import ConfigError, ResourceError

ServerPrompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

_SECONDS_TO_CONNECT = 10.0
_SHOWN = 300  # characters of a server's message


def server_address(url: str) -> str:
    """Return an address without a slash at its end, and with `/v1` if it has no path."""
    if "@" in url:
        raise ConfigError(
            "the URL has a name or a password, which messages would show",
            expected="an address such as http://127.0.0.1:8000/v1",
            got="an address with @",
            remedy="pass the API key in the environment variable JAKIRO_API_KEY",
        )
    try:
        parsed = httpx2.URL(url.strip())
    except httpx2.InvalidURL:
        parsed = httpx2.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(
            "the URL is not the address of a server",
            expected="an address such as http://127.0.0.1:8000/v1",
            got=url,
        )
    return str(parsed).rstrip("/") + ("/v1" if parsed.path in ("", "/") else "")


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error) or 'no further description'}"


def key_error(url: str, status: int, *, has_key: bool) -> ConfigError:
    return ConfigError(
        f"the server at {url} refuses the API key",
        expected="a key that the server accepts",
        got=f"status {status} with {'this key' if has_key else 'no key'}",
        remedy="set the environment variable JAKIRO_API_KEY to a key of the server",
    )


def seconds_to_wait(retry_after: str | None) -> float:
    """Return the seconds that a header `Retry-After` asks for; one if it has no number."""
    try:
        seconds = float(retry_after or 1)
    except ValueError:
        return 1.0
    return seconds if seconds >= 0 else 0.0


class ServerAnswer(NamedTuple):
    """A complete answer; numbers of the prompt's tokens and of accepted drafts may be missing."""

    text: str
    finish_reason: str = "length"
    prompt_tokens: int | None = None
    accepted: int | None = None


class ServerClient:
    """A client of one server, which several threads may use."""

    def __init__(self, url: str, key: str | None = None, seconds: float = 600.0) -> None:
        self.url = server_address(url)
        self.seconds = seconds
        self.model = ""  # until `connect` is called
        self._has_key = key is not None
        self._http = httpx2.Client(
            base_url=f"{self.url}/",
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=httpx2.Timeout(seconds, connect=_SECONDS_TO_CONNECT),
            limits=httpx2.Limits(max_connections=None),
        )

    def connect(self, model: str | None = None) -> None:
        """Find the model that all later requests name; None for the server's only one."""
        response = self._send("GET", "models")
        try:
            names = [one["id"] for one in response.json()["data"]]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"there is no interface like OpenAI's at {self.url}",
                expected="a list of models at the path /models",
                got=f"status {response.status_code} with other content",
                remedy="check the URL, which usually ends with /v1, or wait if the server is "
                "still loading",
            ) from error
        chosen = [name for name in names if model in (None, name)]
        if len(chosen) != 1:
            raise ConfigError(
                f"the server at {self.url} does not have this model"
                if model is not None
                else f"the server at {self.url} has several models, or none",
                expected=f"one of {', '.join(names)}" if names else "a server with a model",
                got=model or f"no --model, and {len(names)} models",
                remedy="choose one with --model",
            )
        self.model = chosen[0]

    def ask(self, prompt: ServerPrompt, **options: Any) -> ServerAnswer:
        is_chat = not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
        content = prompt if isinstance(prompt, str) else list(prompt)
        body: dict[str, Any] = {"model": self.model, "messages" if is_chat else "prompt": content}
        body |= options
        response = self._send("POST", "chat/completions" if is_chat else "completions", json=body)
        try:
            return _read(response.raise_for_status().json())
        except (
            httpx2.HTTPStatusError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            raise ResourceError(
                f"the server at {self.url} does not answer a request",
                expected="a complete answer with status 200",
                got=f"status {response.status_code}: {response.text[:_SHOWN].strip()}",
                remedy="check the options, and the log of the server",
            ) from error

    def close(self) -> None:
        self._http.close()

    def _send(self, method: str, path: str, **content: Any) -> httpx2.Response:
        """Return the response; a request to a busy server is sent again."""
        started = time.monotonic()
        while True:
            try:
                response = self._http.request(method, path, **content)
            except httpx2.HTTPError as error:
                raise ResourceError(
                    f"cannot reach the server at {self.url}",
                    expected="a server that is running and can be reached from here",
                    got=describe(error),
                    remedy="start the server, or check --url",
                ) from error
            is_busy = response.status_code == httpx2.codes.TOO_MANY_REQUESTS
            if not is_busy or time.monotonic() - started > self.seconds:
                break
            time.sleep(min(seconds_to_wait(response.headers.get("retry-after")), self.seconds))
        if response.status_code in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
            raise key_error(self.url, response.status_code, has_key=self._has_key)
        return response


def _read(body: dict[str, Any]) -> ServerAnswer:
    choice = body["choices"][0]
    usage = body.get("usage") or {}
    details = usage.get("completion_tokens_details") or {}
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return ServerAnswer(
        text=text or "",
        finish_reason=choice["finish_reason"],
        prompt_tokens=usage.get("prompt_tokens"),
        accepted=details.get("accepted_prediction_tokens"),
    )
