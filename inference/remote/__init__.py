"""Verification of a device's draft trees by a server: messages, and the rules that both ends obey.

Nothing here depends on HTTP, and nothing imports the server or a client.
"""
