"""The limits and checks that a request must pass: connection, size, origin, key, and rates."""
