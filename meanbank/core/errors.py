"""Errors for users."""


class ContextFileError(ValueError):
    """A context file that cannot be written, or cannot be trusted; the message is one line."""


class BankStorageError(ValueError):
    """Tables that cannot be where they are wanted; the message is one line."""


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks; its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
