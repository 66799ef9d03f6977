"""Verification of draft trees that devices send: their sessions, and the routes to them."""
