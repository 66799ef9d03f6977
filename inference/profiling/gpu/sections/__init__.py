"""The sections of `jakiro profile gpu`, each of which measures one part of decoding."""
