"""From files of texts and conversations to packed batches that every process agrees on."""
