"""What a user can mend: said in one message, without a traceback."""


class BadInput(ValueError):
    """An argument, a file or a folder that cannot be used; raised before any model loads."""
