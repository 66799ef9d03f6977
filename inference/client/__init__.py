"""A client of servers with OpenAI's interface, with the time at which each part of a text arrives.

`jakiro bench --url` and `jakiro verify --url` use it with Jakiro's own server and with others.
"""
