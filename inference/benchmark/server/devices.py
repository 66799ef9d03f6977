"""Clients of a load test that draft by themselves, and what the server has decided about them."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx2

from inference.benchmark.bad_network import PASSED, UNANSWERED, Schedule, bad_network
from inference.benchmark.server.document import DecidedSteps, DeviceSteps
from inference.client.answer import ServerAnswer, TokenUsage
from inference.client.request import ServerRequest
from inference.device import RemoteDecoder
from inference.device.text import RemoteOutput
from jakiro.errors import ConfigError, JakiroError

_SESSIONS = "/sessions"  # part of the paths of requests that are repeated until they are answered
_LOCAL = re.compile(r"(http://[^/]+)/v1")
_COUNTER = re.compile(r'^jakiro_remote_steps_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE)


@dataclass
class DeviceAnswer(ServerAnswer):
    """A text that was drafted here, or the reason why there is none.

    Attributes:
        device: its decoding steps and requests; None if there is no text.
    """

    device: DeviceSteps | None = None


class DeviceClient:
    """A client that drafts, and whose texts are verified one after the other.

    Args:
        url: address of the server.
        key: API key; None to send none.
        drafter: name of the drafter.
        seconds: seconds without any answer after which a text is given up.

    Raises:
        JakiroError: as for `RemoteDecoder`.
    """

    def __init__(self, url: str, key: str | None, drafter: str, seconds: float) -> None:
        self._decoder = RemoteDecoder(url, drafter, key=key, patience=seconds)

    def close(self) -> None:
        """Close all connections."""
        self._decoder.close()

    def ask(self, request: ServerRequest) -> DeviceAnswer:
        """Return the text of a request.

        Args:
            request: prompt and options.
        """
        answer, started = DeviceAnswer(), time.perf_counter()
        prompt: Any = request.prompt
        try:
            output = self._decoder.generate(
                prompt,
                max_new_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed,
                on_text=lambda _: answer.arrivals.append(time.perf_counter() - started),
            )
        except JakiroError as error:
            answer.error = str(error)
        else:
            _fill(answer, output)
        answer.seconds = time.perf_counter() - started
        return answer


def _fill(answer: DeviceAnswer, output: RemoteOutput) -> None:
    stats, traffic = output.stats, output.traffic
    num_new = len(output.new_token_ids)
    accepted = stats.accepted.total()
    answer.status = httpx2.codes.OK
    answer.text = output.text or ""
    answer.finish_reason = output.finish_reason
    answer.usage = TokenUsage(
        prompt=output.sequences.shape[1] - num_new,
        completion=num_new,
        accepted=accepted,
        rejected=stats.proposed_by_proposer.total() - accepted,
    )
    answer.device = DeviceSteps(
        steps=stats.target_forwards, repeats=traffic.num_repeats, resumes=traffic.num_resumes
    )


@contextmanager
def losing_replies(url: str, share: float, seed: int) -> Iterator[str]:
    """Yield an address of a server, on the way from which a share of the replies is lost.

    Replies about sessions of devices are lost after the server has sent them. All others arrive.

    Args:
        url: address of the server.
        share: share of the replies; with 0, the yielded address is that of the server.
        seed: seed of the random choices.

    Raises:
        ConfigError: the server has another kind of address.
    """
    if not share:
        yield url
        return
    if (local := _LOCAL.fullmatch(url)) is None:
        raise ConfigError(
            "replies can be lost only on connections without encryption",
            expected="a server such as http://127.0.0.1:8000/v1",
            got=url,
            remedy="leave out --lost-share, or measure such a server",
        )
    with bad_network(local[1], _losing(share, seed)) as network:
        yield network.url


def _losing(share: float, seed: int) -> Schedule:
    def schedule(number: int, path: str) -> str:
        is_lost = _SESSIONS in path and Random(f"{seed} {number}").random() < share
        return UNANSWERED if is_lost else PASSED

    return schedule


async def decided_steps(url: str, key: str | None) -> DecidedSteps | None:
    """Return what a server has decided since its start; None if it does not say so.

    Args:
        url: address of the server.
        key: API key; None to send none.
    """
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        async with httpx2.AsyncClient(headers=headers) as http:
            page = await http.get(f"{url.removesuffix('/v1')}/metrics")
    except httpx2.HTTPError:
        return None
    if page.status_code != httpx2.codes.OK:
        return None
    found = {outcome: int(float(count)) for outcome, count in _COUNTER.findall(page.text)}
    return DecidedSteps(decided=found.get("decided", 0), replayed=found.get("replayed", 0))
