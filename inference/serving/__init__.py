"""The server with OpenAI's interface."""
