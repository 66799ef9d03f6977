"""Responses by the target itself in place of those in the data: drafts are made for these."""
