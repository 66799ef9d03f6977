"""Shapes of draft trees, and their growth level by level."""
