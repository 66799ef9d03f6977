"""Measurements of the decode engine, of automatic trees, and of rounding (`jakiro profile`)."""
