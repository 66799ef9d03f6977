"""Drafters, which all implement the protocol in `inference.protocol`."""
