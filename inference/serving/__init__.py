"""Drafters in the servers of other projects."""
