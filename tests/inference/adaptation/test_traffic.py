"""Recent texts are bounded and kept apart by tenants."""

from inference.adaptation.lesson import Passage
from inference.adaptation.traffic import TrafficRing


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _filled(count: int, tenant: str = "a", ring: TrafficRing | None = None) -> TrafficRing:
    ring = TrafficRing(10_000, 60.0) if ring is None else ring
    for number in range(count):
        ring.add(tenant, [number, 1, 2, 3], 2)
    return ring


def _texts(ring: TrafficRing) -> list[Passage]:
    traffic = ring.traffic(99, 99)
    return [*traffic.learned, *traffic.held_out]


def test_texts_that_are_too_old_are_forgotten() -> None:
    clock = _Clock()
    ring = TrafficRing(1000, 60.0, clock)
    ring.add("a", [1, 2, 3], 1)
    clock.now = 50.0
    ring.add("a", [4, 5, 6], 1)
    clock.now = 61.0
    texts = [text.token_ids for text in _texts(ring)]
    assert texts == [(4, 5, 6)]
    assert ring.num_tokens == 3


def test_the_tenant_with_the_most_tokens_makes_room() -> None:
    ring = TrafficRing(max_tokens=40, max_seconds=60.0)
    ring.add("quiet", [7, 8, 9, 9], 2)
    _filled(100, "loud", ring)
    assert ring.num_tokens == 40
    texts = _texts(ring)
    assert (7, 8, 9, 9) in [text.token_ids for text in texts]
    assert ring.traffic(99, 99).tenants == ("loud", "quiet")
    assert max(text.token_ids[0] for text in texts) == 99  # the newest ones have stayed


def test_a_purge_forgets_one_tenant_completely() -> None:
    ring = _filled(20, "b", _filled(10, "a"))
    assert ring.purge("b") == 20
    assert (len(ring), ring.num_tokens) == (10, 40)
    assert ring.traffic(99, 99).tenants == ("a",)
    assert ring.purge("b") == 0


def test_a_repeated_text_is_kept_once_for_each_tenant() -> None:
    ring = TrafficRing(1000, 60.0)
    assert ring.add("a", [1, 2, 3], 1)
    assert not ring.add("a", [1, 2, 3], 1)
    assert ring.add("b", [1, 2, 3], 1)
    assert len(ring) == 2


def test_equal_texts_are_all_learned_from_or_all_held_out() -> None:
    ring = TrafficRing(100_000, 60.0)
    for number in range(200):
        for tenant in "abc":
            ring.add(tenant, [number, 1, 2], 1)
    learned, held_out, _ = ring.traffic(1000, 1000)
    assert not {text.token_ids for text in learned} & {text.token_ids for text in held_out}
    assert 10 < len(held_out) < 50


def test_continuations_of_one_prompt_are_all_learned_from_or_all_held_out() -> None:
    ring = TrafficRing(100_000, 60.0)
    for prompt in range(100):
        for end in range(5):
            ring.add("ab"[end % 2], [prompt, 1, 2, end], 2)
    learned, held_out, _ = ring.traffic(1000, 1000)
    assert not {text.prompt for text in learned} & {text.prompt for text in held_out}
    # A prompt is measured once: more often, it would make the measurement look more certain.
    assert len({text.prompt for text in held_out}) == len(held_out) > 4
    assert all(text.token_ids[-1] == 4 for text in held_out)


def test_half_of_a_lesson_is_new_and_half_is_spread_over_the_rest() -> None:
    learned = _filled(400).traffic(20, 4).learned
    first = [text.token_ids[0] for text in learned]
    assert first == sorted(first)
    assert len(first) == len(set(first)) == 20
    assert first[0] < 10
    assert sum(number > 380 for number in first) >= 9
