"""An HTTP server for translation models, with LibreTranslate's interface; it needs the extra `[serve]`."""
