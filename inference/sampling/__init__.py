"""Sampling options, processed distributions, and the random numbers of decoding steps."""
