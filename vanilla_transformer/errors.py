"""The one exception that scripts show without a traceback."""


class UserError(Exception):
    """Something that the user can mend: one sentence that names the culprit and the remedy."""
