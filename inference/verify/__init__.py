"""Shows on a user's own models that decoding with a drafter is lossless."""

from inference.verify.records import Check, Verdict, VerifySettings
from inference.verify.verification import verify_losslessness

__all__ = ["Check", "Verdict", "VerifySettings", "verify_losslessness"]
