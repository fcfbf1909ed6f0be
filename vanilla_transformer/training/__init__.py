"""What train.py is made of: options (`arguments`), setup (`builders`), `optimization`, `state`, `checkpoint`, ..."""
