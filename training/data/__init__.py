"""Training data: files of texts and conversations, read into tokens, packed and batched."""
