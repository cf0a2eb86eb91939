"""The one error a user sees: a sentence that says what was found, what was expected and what to do."""


class UserError(Exception):
    """Raised for anything a user can mend. The command line prints its text and exits with code 2."""
