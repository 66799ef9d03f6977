"""Acceptance lengths of drafters on texts that the target has written, without verification."""
