"""Sentences to batches: `readers`, `catalogues` and `files` read text, `pairs` finds, divides and tokenizes the pairs,
`survey` says what is odd about them, `tokenizer` makes the vocabulary, `batches` pads."""
