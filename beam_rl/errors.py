"""What ends a command with one line in the user's words: wrong input with exit code 2, a full disk with 1."""


class InputError(ValueError):
    """Wrong input: names the recipe's key or the file, the value, and what would do."""


class SaveError(RuntimeError):
    """The disk did not take a checkpoint, or is full: the run has failed, and what was saved before stands. One line."""
