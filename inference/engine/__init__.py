"""The decoding loop: propose, verify, accept and commit."""
