"""`jakiro bench --url`: load tests of a running server with OpenAI's interface."""
