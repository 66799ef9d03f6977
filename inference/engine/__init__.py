"""The decoding loop: propose, verify, accept, commit."""
