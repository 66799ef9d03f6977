"""A network between a client and a server on this machine, simulated by a proxy of TCP connections.

The proxy delays bytes by half of the round trip in each direction and by the rate of the link,
which all connections share. It models loss as TCP shows it to programs: a lost packet, and all that
follows it on its connection, arrives after a retransmission. Jitter lets connections overtake each
other. While the link is down, connections break and new ones are refused. Slow start is left out.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

PACKET = 1448  # bytes of a segment
_RETRANSMISSION = 0.2  # seconds in addition to a round trip: the shortest time-out of Linux
_READ = 65_536
_SETTLING = 0.01  # seconds


class NetworkProfile(NamedTuple):
    """A kind of network.

    Attributes:
        round_trip: seconds of a round trip without load.
        down: megabits per second from the server to the client.
        up: megabits per second from the client to the server.
        jitter: largest number of seconds by which a message in one direction is delayed further.
        loss: probability that a packet is lost.
        period: seconds from one disconnection to the next; None for no disconnections.
        outage: seconds that a disconnection takes.
    """

    round_trip: float
    down: float
    up: float
    jitter: float = 0.0
    loss: float = 0.0
    period: float | None = None
    outage: float = 0.0


PROFILES = {
    "LAN": NetworkProfile(0.001, 1000, 1000),
    "Wi-Fi": NetworkProfile(0.006, 150, 100, jitter=0.004, loss=0.001),
    "5G": NetworkProfile(0.025, 100, 30, jitter=0.005),
    "4G": NetworkProfile(0.060, 20, 8, jitter=0.010, loss=0.001),
    "poor": NetworkProfile(0.150, 3, 1, jitter=0.050, loss=0.02),
    "disconnections": NetworkProfile(
        0.060, 20, 8, jitter=0.010, loss=0.001, period=4.0, outage=1.0
    ),
}


@dataclass
class NetworkTraffic:
    """Traffic through the proxy: bytes of HTTP with its headers, without those of TCP and TLS."""

    up: int = 0
    down: int = 0
    num_connections: int = 0
    num_lost: int = 0  # packets
    num_cut: int = 0  # connections, on either side of the proxy


class _Direction:
    """One direction of the link.

    Args:
        profile: kind of network.
        rate: bytes per second.
        generator: source of random numbers.
    """

    def __init__(self, profile: NetworkProfile, rate: float, generator: random.Random) -> None:
        self._profile, self._rate, self._generator = profile, rate, generator
        self._free_at = 0.0  # time at which the link has sent all that was queued

    def arrival(self, size: int, now: float) -> tuple[float, int]:
        """Return the time at which bytes arrive, and the number of their packets that were lost.

        Args:
            size: number of bytes.
            now: time at which they are sent.
        """
        profile = self._profile
        self._free_at = max(self._free_at, now) + size / self._rate
        packets = -(-size // PACKET)
        lost = sum(self._generator.random() < profile.loss for _ in range(packets))
        delay = profile.round_trip / 2 + self._generator.uniform(0, profile.jitter)
        again = _RETRANSMISSION + profile.round_trip if lost else 0.0
        return self._free_at + delay + again, lost


class SimulatedNetwork:
    """A proxy in front of a server; `simulated_network` starts and stops it.

    Args:
        server: address of the server, such as http://127.0.0.1:8000/v1.
        profile: kind of network.
        seed: seed of losses and jitter.

    Attributes:
        traffic: what has passed so far.
        port: port of the proxy, on 127.0.0.1.
    """

    def __init__(self, server: str, profile: NetworkProfile, seed: int = 0) -> None:
        self.traffic = NetworkTraffic()
        self.port = 0
        self._server = urlsplit(server)
        self._profile = profile
        generator = random.Random(seed)
        self._up = _Direction(profile, profile.up * 125e3, generator)
        self._down = _Direction(profile, profile.down * 125e3, generator)
        self._started = time.monotonic()
        self._open: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[Any]] = set()
        self._ready, self._stop = Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = Thread(target=lambda: asyncio.run(self._run()))

    @property
    def url(self) -> str:
        """The address of the server's interface, through the network."""
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Start the proxy, and wait until it is ready."""
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """Break all connections, and stop the proxy."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def is_down(self) -> bool:
        """Whether the link is down now."""
        period = self._profile.period
        return period is not None and self._age % period >= period - self._profile.outage

    @property
    def _age(self) -> float:
        return time.monotonic() - self._started

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        cutter = asyncio.create_task(self._cut_when_down())
        self._ready.set()
        await self._stop.wait()
        cutter.cancel()
        # A connection that was accepted but has not begun yet is not cancelled: it closes itself.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            self._cut()
            for task in self._connections:
                task.cancel()
            await asyncio.wait(others, timeout=_SETTLING)
        server.close()  # not earlier, because a connection that begins needs the server
        await asyncio.sleep(0)  # lets transports close their sockets

    async def _cut_when_down(self) -> None:
        period = self._profile.period
        if period is None:
            return
        while True:
            up = period - self._profile.outage - self._age % period
            await asyncio.sleep(up if up > 0 else up + period)
            self._cut()

    def _cut(self) -> None:
        for writer in list(self._open):
            self.traffic.num_cut += 1
            writer.transport.abort()
        self._open.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self.is_down or self._stop.is_set():
            writer.transport.abort()
            return
        self.traffic.num_connections += 1
        self._connections.add(task)
        self._open.add(writer)
        pumps: list[asyncio.Task[None]] = []
        try:
            await asyncio.sleep(self._profile.round_trip)  # for the handshake of TCP
            own = self._server
            upstream, server = await asyncio.open_connection(own.hostname, own.port)
            self._open.add(server)
            for way in (
                self._pump(reader, server, self._up, "up"),
                self._pump(upstream, writer, self._down, "down"),
            ):
                pumps.append(asyncio.create_task(way))
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            self._open.discard(server)
            server.transport.abort()
        except (OSError, asyncio.CancelledError):  # the server is gone, or the network ends
            pass
        finally:
            for pump in pumps:
                pump.cancel()
            self._connections.discard(task)
            self._open.discard(writer)
            writer.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: _Direction,
        name: str,
    ) -> None:
        """Pass bytes on in their order, until one end closes the connection."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivery = asyncio.create_task(_deliver(queue, writer))
        try:
            while data := await reader.read(_READ):
                when, lost = direction.arrival(len(data), time.monotonic())
                self.traffic.num_lost += lost
                setattr(self.traffic, name, getattr(self.traffic, name) + len(data))
                queue.put_nowait((when, data))
            queue.put_nowait((0.0, b""))
            await delivery
        except ConnectionError:
            pass
        finally:
            delivery.cancel()


async def _deliver(queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    """Write bytes when they have arrived, until an empty message comes."""
    while True:
        when, data = await queue.get()
        if not data:
            return
        await asyncio.sleep(max(0.0, when - time.monotonic()))
        with suppress(ConnectionError):
            writer.write(data)
            await writer.drain()


@contextmanager
def simulated_network(
    server: str, profile: NetworkProfile, seed: int = 0
) -> Iterator[SimulatedNetwork]:
    """Run a proxy in the block.

    Args:
        server: address of the server, such as http://127.0.0.1:8000/v1.
        profile: kind of network.
        seed: seed of losses and jitter.
    """
    found = SimulatedNetwork(server, profile, seed)
    found.start()
    try:
        yield found
    finally:
        found.close()
