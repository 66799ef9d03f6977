"""ADED: a training-free drafter with an adaptive trigram table (arXiv 2407.12021)."""

from inference.drafters.aded.drafter import AdedDrafter, AdedSettings

__all__ = ["AdedDrafter", "AdedSettings"]
