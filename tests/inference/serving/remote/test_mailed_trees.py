"""Trees from elsewhere are verified as they are, once."""

import torch
from helpers.remote import LIMITS, mixed
from helpers.tables import no_processors

from inference.protocol import Budget, Committed
from inference.sampling.random_numbers import StepRandom
from inference.serving.remote.mailed_trees import MailedTrees


def _committed(length: int) -> Committed:
    end = torch.tensor([length])
    tokens = torch.zeros(1, length, dtype=torch.long)
    return Committed((length,), (length,), tokens, tokens[:, :1], None, end - length, end, False)


def test_a_tree_is_proposed_once_below_the_last_token() -> None:
    drafter = MailedTrees(LIMITS)
    session = drafter.new_session(no_processors(), capacity=20)
    session.advance(_committed(4))
    drafter.tree = mixed()
    tree = session.propose(Budget(1), StepRandom())
    assert tree.token_ids.tolist() == [[3, 5, 2, 4]]
    assert tree.base_length.tolist() == [4]
    assert session.propose(Budget(1), StepRandom()).num_nodes == 0


def test_the_limits_are_those_of_the_checks_of_trees_and_chains() -> None:
    drafter = MailedTrees(LIMITS)
    assert drafter.max_nodes == LIMITS.largest
    assert drafter.max_depth == LIMITS.max_chain > LIMITS.max_depth


def test_a_session_follows_its_sequence() -> None:
    session = MailedTrees(LIMITS).new_session(no_processors(), capacity=20)
    session.advance(_committed(4))
    session.rollback(2)
    assert session.lengths == (2,)
    session.select_sequences([])
    assert session.lengths == ()
