"""Continuous decoding of requests that arrive at any time."""
