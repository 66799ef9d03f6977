"""The demonstration: an embedded target, a drafter trained for it, and what it gains."""
