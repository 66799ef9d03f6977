"""Prompts, generation configs, streaming and `custom_generate`: the side facing transformers."""
