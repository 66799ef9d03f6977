"""Checks that decoding with a drafter is lossless for the user's own models (`jakiro verify`)."""
