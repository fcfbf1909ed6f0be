"""Sentences to batches: `rows` opens datasets and files, which `readers` and `catalogues` read; `columns` finds the
pairs, `splits` divides and mixes them, `survey` says what is odd about them, `tokenizer` makes the vocabulary,
`encoding` the token ids, `batches` and `stream` the batches."""
