"""The decode loop: propose, verify, accept, commit."""
