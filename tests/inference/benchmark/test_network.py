"""A simulated network between a client and a server."""

import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

import pytest

from inference.benchmark.network import (
    PROFILES,
    NetworkProfile,
    SimulatedNetwork,
    _Direction,
    simulated_network,
)


@contextmanager
def _echo() -> Iterator[str]:
    """Run a server that returns what it receives, and yield its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            Thread(target=_answer, args=(connection,), daemon=True).start()

    thread = Thread(target=serve)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def _answer(connection: socket.socket) -> None:
    with connection, suppress(ConnectionError):
        while data := connection.recv(65_536):
            connection.sendall(data)


def _send_and_receive(client: socket.socket) -> None:
    client.sendall(b"y")
    if not client.recv(10):
        raise ConnectionResetError


def _exchange(network: SimulatedNetwork, size: int, times: int = 1) -> list[float]:
    """Return the seconds of exchanges on one connection."""
    seconds = []
    with socket.create_connection(("127.0.0.1", network.port)) as client:
        for _ in range(times):
            started, left = time.monotonic(), size
            client.sendall(b"x" * size)
            while left:
                got = client.recv(65_536)
                assert got
                left -= len(got)
            seconds.append(time.monotonic() - started)
    return seconds


def test_messages_take_a_round_trip_and_are_counted() -> None:
    with (
        _echo() as server,
        simulated_network(server, NetworkProfile(0.05, 1000, 1000)) as network,
    ):
        first, second = _exchange(network, 100, times=2)
    assert first >= 0.1  # with the handshake
    assert 0.05 <= second < 0.09
    assert (network.traffic.up, network.traffic.down) == (200, 200)
    assert network.traffic.num_connections == 1


def test_a_slow_link_limits_the_rate() -> None:
    with (
        _echo() as server,
        simulated_network(server, NetworkProfile(0.0, 8, 1)) as network,
    ):
        (seconds,) = _exchange(network, 20_000)
    assert 20_000 / 125_000 <= seconds < 0.6


def test_lost_packets_arrive_later() -> None:
    direction = _Direction(NetworkProfile(0.1, 1, 1, loss=1.0), 1e9, random.Random(0))
    when, lost = direction.arrival(3000, now=5.0)
    assert lost == 3
    assert when == pytest.approx(5.0 + 0.05 + 0.3, abs=1e-3)


def test_messages_of_other_connections_may_overtake_but_a_link_is_shared() -> None:
    profile = NetworkProfile(0.0, 1, 1, jitter=0.1)
    direction = _Direction(profile, 1e9, random.Random(1))
    times = [direction.arrival(10, now=0.0)[0] for _ in range(20)]
    assert times != sorted(times)
    slow = _Direction(profile._replace(jitter=0.0), 100.0, random.Random(1))
    assert [slow.arrival(100, now=0.0)[0] for _ in range(3)] == pytest.approx([1.0, 2.0, 3.0])


def test_a_disconnection_breaks_connections_and_refuses_others() -> None:
    profile = NetworkProfile(0.0, 1000, 1000, period=0.4, outage=0.2)
    with _echo() as server, simulated_network(server, profile) as network:
        with socket.create_connection(("127.0.0.1", network.port)) as client:
            client.sendall(b"x")
            assert client.recv(10) == b"x"
            while not network.is_down:
                time.sleep(0.01)
            time.sleep(0.05)
            with pytest.raises(ConnectionError):
                _send_and_receive(client)
        while network.is_down:
            time.sleep(0.01)
        assert _exchange(network, 10)
    assert network.traffic.num_cut >= 1


def test_the_network_closes_while_bytes_are_on_their_way() -> None:
    with (
        _echo() as server,
        simulated_network(server, NetworkProfile(5.0, 1000, 1000)) as network,
    ):
        client = socket.create_connection(("127.0.0.1", network.port))
        client.sendall(b"x")
    client.close()


def test_profiles_get_worse() -> None:
    times = [own.round_trip for own in PROFILES.values() if own.period is None]
    assert times == sorted(times)
