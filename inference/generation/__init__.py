"""The transformers side: prompts, generation config, streaming, `custom_generate`."""
