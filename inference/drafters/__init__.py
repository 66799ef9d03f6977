"""Drafters; all of them implement `inference.protocol.Drafter`."""
