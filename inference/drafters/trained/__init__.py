"""Drafting with a trained `JakiroDrafter`."""
