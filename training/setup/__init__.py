"""The state of a run before its first step: target, data, initial weights."""
