"""The decode engine: requests, the decode loop, acceptance of candidates, and statistics."""
