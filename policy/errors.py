"""The one error that user input can cause."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input: the field it stands in, what is wrong, and what would be right.

    Every front door turns it into its own form of a refusal (exit status 2 on the command line,
    a 4xx problem over HTTP), so its text is always one line.
    """

    def __init__(self, field: str, problem: str, expected: str = "") -> None:
        self.field = field
        self.problem = problem
        self.expected = expected
        text = f"{field}: {problem}"
        if expected:
            text += f" (expected {expected})"
        super().__init__(" ".join(text.split()))
