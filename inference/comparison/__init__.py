"""The same prompts by several methods, in one process, with figures that can be believed."""
