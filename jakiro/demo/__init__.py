"""The demo: a toy target, a drafter trained for this target, and the speed-up of drafting."""
