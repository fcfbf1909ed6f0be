"""What a Translator may have besides our models in torch: any other model of transformers, or CTranslate2."""


def load_ctranslate2(*args, **kwargs):
    """What [`ctranslate2.load`] returns, which needs CTranslate2 only when it is called."""
    try:
        from .ctranslate2 import load
    except ImportError as error:
        raise ImportError("Run `pip install ctranslate2` for this backend.") from error
    return load(*args, **kwargs)
