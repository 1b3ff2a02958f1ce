"""Errors for users."""


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks; its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
