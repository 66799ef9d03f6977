"""Experiments made of several training runs."""
