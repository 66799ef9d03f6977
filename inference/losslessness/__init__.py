"""Checks on a user's own models that decoding with a drafter is lossless (`jakiro verify`)."""

from inference.losslessness.check import verify_losslessness
from inference.losslessness.records import Check, VerifyReport, VerifySettings

__all__ = ["Check", "VerifyReport", "VerifySettings", "verify_losslessness"]
