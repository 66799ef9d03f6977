"""The demo: a chat model or a toy target, a drafter trained for it, and its speed-up."""
