"""One module for each verb of the command line, which `__main__.py` lists."""
