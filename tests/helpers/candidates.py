"""Properties of candidates that every drafter's trees must have."""

from inference.drafters.candidates import Candidates


def assert_well_formed(found: Candidates, num_nodes: int, depth: int) -> None:
    """Check the properties that every tree of candidates must have."""
    assert len(found.token_ids) <= num_nodes
    pairs = list(zip(found.parents.tolist(), found.token_ids.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    for node, parent in enumerate(found.parents.tolist()):
        assert -1 <= parent < node
        assert found.depths[node] == (1 if parent < 0 else found.depths[parent] + 1) <= depth
        assert 0 < found.scores[node] <= (1 if parent < 0 else found.scores[parent])
