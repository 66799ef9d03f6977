"""Answers of a server, of which no more is read than they can contain."""

from typing import NamedTuple

import httpx2

from jakiro.errors import ConfigError

_UNCOMPRESSED = ("", "identity")


class HttpAnswer(NamedTuple):
    """An answer that has arrived completely; long descriptions of errors are left out."""

    status: int
    headers: httpx2.Headers
    content: bytes

    @property
    def is_success(self) -> bool:
        """Whether the request was answered as it was meant."""
        return httpx2.codes.is_success(self.status)


def answer_to(
    http: httpx2.Client,
    method: str,
    path: str,
    body: bytes,
    limit: int,
    seconds: float | None = None,
) -> HttpAnswer:
    """Return the answer to a request.

    A compressed answer could become much larger than what arrives, so that none is accepted. The
    client's header `Accept-Encoding` must say so.

    Args:
        http: client of the server.
        method: method of the request.
        path: path below the server's address.
        body: body of the request.
        limit: largest size of the answer in bytes.
        seconds: seconds without any part of the answer after which to give up; None for those of
            the client.

    Raises:
        ConfigError: the answer is larger, or compressed; no more of it is read.
        HTTPError: of httpx2, if no answer arrives.
    """
    timeout = http.timeout if seconds is None else _limited_to(seconds, http.timeout)
    with http.stream(method, path, content=body, timeout=timeout) as response:
        coding = response.headers.get("content-encoding", "").strip().lower()
        content = _limited(response, limit) if coding in _UNCOMPRESSED else None
        if content is None and response.is_success:
            raise ConfigError(
                f"the server at {str(http.base_url).rstrip('/')} answers with more than it was "
                "asked for",
                expected=f"at most {limit} bytes, which are not compressed",
                got=f"the encoding {coding[:20]}" if coding not in _UNCOMPRESSED else "more",
                remedy="check the URL, and use a server that you trust, of the same version",
            )
        return HttpAnswer(response.status_code, response.headers, content or b"")


def _limited_to(seconds: float, usual: httpx2.Timeout) -> httpx2.Timeout:
    """Return a time limit; connecting may not take longer than usual."""
    connect = seconds if usual.connect is None else min(seconds, usual.connect)
    return httpx2.Timeout(seconds, connect=connect)


def _limited(response: httpx2.Response, limit: int) -> bytes | None:
    """Return the body of a response; None if it is larger than the limit."""
    parts, size = [], 0
    for part in response.iter_raw():
        parts.append(part)
        size += len(part)
        if size > limit:
            return None
    return b"".join(parts)
