from .marian import from_marian, from_torch_transformer, load_foreign
