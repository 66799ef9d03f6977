"""A target, and texts that it continues greedily, some of which have a common prefix."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from helpers.vllm_drafters import PROMPT, VOCAB, greedy
from helpers.vllm_engine import DRAFTS
from torch import Tensor

LENGTH = 32  # generated tokens
SHARED = (96, 100)  # lengths of a prefix that several prompts have in common


class World(NamedTuple):
    """A target, its folder, and its greedy texts.

    Attributes:
        groups: groups of prompts of the same length, continued greedily by some more tokens than
            are generated in the tests.
    """

    model: Any
    folder: Path
    groups: list[Tensor]
    lengths: list[int]

    @property
    def texts(self) -> list[tuple[list[int], list[int]]]:
        """Pairs of a prompt and its whole text."""
        return [
            (text[:length], text)
            for group, length in zip(self.groups, self.lengths, strict=True)
            for text in group.tolist()
        ]


def world_of(model: Any, folder: Path) -> World:
    """Save a target, and return it with its greedy texts."""
    model.save_pretrained(folder)
    source = random.Random(0)
    short = [PROMPT] + [[source.randrange(VOCAB) for _ in PROMPT] for _ in range(7)]
    prefix = [source.randrange(VOCAB) for _ in range(SHARED[-1])]
    longer = [[prefix[:length] + ids for ids in short[:4]] for length in SHARED]
    prompts = [short, *longer]
    groups = [
        torch.tensor([ids + greedy(model, ids, LENGTH + DRAFTS) for ids in group])
        for group in prompts
    ]
    return World(model, folder, groups, [len(group[0]) for group in prompts])
