"""Engines for a Translator besides torch, each imported only when it is used."""
