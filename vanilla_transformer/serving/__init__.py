"""An HTTP server that translates, in the words of LibreTranslate; it needs the extra `[serve]`."""
