"""The demo: a toy target, a drafter trained for it, and the speed-up of drafting."""
