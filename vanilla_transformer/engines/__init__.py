"""What runs a model for a Translator besides `TorchEngine`: `generate` of any other model, or CTranslate2."""


def load_ctranslate2(*args, **kwargs):
    """Calls [`ctranslate2.load`]; CTranslate2 is imported only now."""
    try:
        from .ctranslate2 import load
    except ModuleNotFoundError as error:
        raise ImportError("Run `pip install ctranslate2` for this backend.") from error
    return load(*args, **kwargs)
