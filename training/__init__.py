"""Training of a drafter for a frozen target: data, objectives, and the DeepSpeed loop."""
