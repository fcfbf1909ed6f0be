"""Sentences to batches: `pairs` reads and tokenizes text, `tokenizer` makes the vocabulary, `batches` pads."""
