"""The state of a run before its first optimizer step: target, data, and initial weights."""
