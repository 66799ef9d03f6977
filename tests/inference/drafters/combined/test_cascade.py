"""The first of two drafters drafts where it adds tokens per second, and rests elsewhere.

The second drafter always drafts. The strength of its drafts, here called guesses, decides whether
the first one drafts too.
"""

from inference.drafters.candidates import Candidates
from inference.drafters.combined.cascade import LONGEST_REST, Cascade, DraftCosts
from inference.protocol import Budget
from inference.trees.shape import TreeShape

SHAPE = TreeShape(autoregressive_levels=3, parallel_levels=0)
COSTS = DraftCosts(verify=lambda _: 1.0, draft={1: 0.2, 2: 0.3, 3: 0.4})
CHAIN = Candidates.of([(5, -1, 1, 1.0), (6, 0, 2, 0.9), (7, 1, 3, 0.8)])
STRONG, WEAK = CHAIN._replace(strength=8), CHAIN._replace(strength=1)
LIMIT = Budget(8, 3)
RIGHT, WRONG = [5, 6, 7, 8], [9]


def _taught(first_is_right: bool) -> Cascade:
    """Return a cascade that saw strong guesses accepted and weak ones rejected."""
    cascade = Cascade(SHAPE, COSTS)
    for _ in range(40):
        cascade.learn(STRONG, 3, 3 if first_is_right else 0, RIGHT)
        cascade.learn(WEAK, 3, 3 if first_is_right else 0, [9, 9, 9, 9])
    return cascade


def test_the_first_drafter_rests_while_strong_guesses_come_true() -> None:
    assert _taught(first_is_right=True).choose([STRONG], LIMIT) == 0


def test_the_first_drafter_drafts_deep_where_guesses_are_weak_or_missing() -> None:
    cascade = _taught(first_is_right=True)
    assert cascade.choose([WEAK], LIMIT) == 3
    assert cascade.choose([Candidates.none()], LIMIT) == 3
    assert cascade.choose([Candidates.none()], Budget(8, 2)) == 2  # no deeper than the budget


def test_larger_trees_must_pay_for_their_verification() -> None:
    cheap, dear = Cascade(SHAPE, COSTS), Cascade(SHAPE, COSTS._replace(verify=lambda n: 1 + n * n))
    for cascade in (cheap, dear):
        for _ in range(40):
            cascade.learn(WEAK, 3, 1, [9, 8, 8, 8])
    assert (cheap.choose([WEAK], LIMIT), dear.choose([WEAK], LIMIT)) == (1, 0)


def test_a_useless_first_drafter_rests_and_is_tried_again_after_a_while() -> None:
    cascade = _taught(first_is_right=False)
    sequences = [Candidates.none()] * 4  # a step counts once, however many sequences it has
    for _ in range(LONGEST_REST):
        assert cascade.choose(sequences, LIMIT) == 0
        for sequence in sequences:
            cascade.learn(sequence, 0, 0, WRONG)
    assert cascade.choose([Candidates.none()], LIMIT) > 0
    cascade.learn(Candidates.none(), 1, 0, WRONG)
    assert cascade.choose([Candidates.none()], LIMIT) == 0


def test_sequences_of_a_batch_share_a_decision() -> None:
    cascade = _taught(first_is_right=True)
    assert cascade.choose([STRONG] * 9 + [WEAK], LIMIT) == 0
    assert cascade.choose([STRONG] + [WEAK] * 9, LIMIT) == 3
