"""The error a user can mend: its message is one line in the user's words, and the command exits with 2."""


class InputError(ValueError):
    """Wrong input: names the recipe's key or the file, the value, and what would do."""
