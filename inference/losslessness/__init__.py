"""Checks that decoding with a drafter is lossless for the user's own models (`jakiro verify`)."""

from inference.losslessness.check import verify_losslessness
from inference.losslessness.records import Check, VerifyReport, VerifySettings

__all__ = ["Check", "VerifyReport", "VerifySettings", "verify_losslessness"]
