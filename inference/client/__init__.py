"""A client of servers with OpenAI's interface, and what all clients of servers share."""
