"""Learning from the texts of a running server, in a process that `jakiro serve --adapt` starts."""
