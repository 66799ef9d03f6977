"""Learning from the texts of requests, in a process separate from the server."""
