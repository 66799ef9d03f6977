"""Learning from the texts of requests, in a process beside the server."""
