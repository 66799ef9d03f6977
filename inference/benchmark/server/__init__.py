"""`jakiro bench --url`: load on a running server with OpenAI's interface."""
