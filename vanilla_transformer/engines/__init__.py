"""Loads the engines other than `TorchEngine`, which is in translation_vanilla_transformer.py, beside `Engine`."""


def load_ctranslate2(*args, **kwargs):
    """Calls [`ctranslate2.load`]. CTranslate2 is imported only when this is called."""
    try:
        from .ctranslate2 import load
    except ModuleNotFoundError as error:
        raise ImportError("Run `pip install ctranslate2` for this backend.") from error
    return load(*args, **kwargs)
