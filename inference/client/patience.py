"""Requests that are repeated as long as the server is too busy."""

import asyncio
import math
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import Random

from inference.client.answer import ServerAnswer
from inference.client.client import ServerClient
from inference.client.request import ServerRequest

TOO_MANY_REQUESTS = 429

_DEFAULT_SECONDS = 1.0  # if the server does not say how long to wait
_LONGEST_JITTER = 0.25  # share of the wait, so that not all clients come back at once


async def ask_patiently(
    client: ServerClient,
    request: ServerRequest,
    source: Random,
    cut_after: int | None = None,
) -> ServerAnswer:
    """Return the answer to a request, which is sent again while the server is too busy.

    After a refusal with status 429, the client waits as long as the header `Retry-After` says, plus
    a random time. It gives up once more than `client.seconds` have passed.

    Args:
        client: client of the server.
        request: request to send.
        source: random numbers.
        cut_after: as for `ServerClient.ask`.
    """
    started = time.monotonic()
    refusals = 0
    while True:
        waited = time.monotonic() - started
        answer = await client.ask(request, cut_after)
        answer.refusals, answer.waited = refusals, waited
        if answer.status != TOO_MANY_REQUESTS or waited > client.seconds:
            return answer
        refusals += 1
        pause = min(seconds_to_wait(answer.retry_after), client.seconds)
        await asyncio.sleep(pause * (1 + _LONGEST_JITTER * source.random()))


def seconds_to_wait(retry_after: str | None, now: datetime | None = None) -> float:
    """Return the seconds that a header `Retry-After` asks for; one second if it is unreadable.

    Args:
        retry_after: value of the header, a number of seconds or a date; None if it is missing.
        now: current time; None for the time of the clock.
    """
    try:
        seconds = float(retry_after or _DEFAULT_SECONDS)
        return _DEFAULT_SECONDS if math.isnan(seconds) else max(seconds, 0.0)
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(str(retry_after))
    except ValueError:
        return _DEFAULT_SECONDS
    aware = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max((aware - (now or datetime.now(UTC))).total_seconds(), 0.0)
