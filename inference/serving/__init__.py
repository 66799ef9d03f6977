"""The server, and drafters in the servers of other projects."""
