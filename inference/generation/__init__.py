"""Prompts, generation configs, streaming and `custom_generate`: the interface to transformers."""
