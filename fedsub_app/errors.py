"""The one error class whose message is written for the user."""


class UserError(Exception):
    """Bad input. The message is one line: what is wrong (key, client or file), its value, what is allowed."""
