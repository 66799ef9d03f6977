"""Answers as OpenAI's interface defines them: fields of requests, replies as text or as events."""
