"""Feedback: what ranks learn of each other, so that plans, which must be equal on all ranks, may depend on it.

All of it is measured while training and travels with document lengths: each kind is a `Reporter`. The gatherer carries
them and knows none of them by name.
"""

from typing import Protocol

from deepspeed_cad.layout import Ints


class Reporter(Protocol):
    """One kind of measurement. Both methods run on the look-ahead thread."""

    columns: int
    """Whole numbers in a report."""

    def report(self, model: int) -> Ints:
        """[columns] what this rank measured since it last reported; `model`: whose documents it travels with."""

    def hear(self, model: int, reports: Ints) -> None:
        """Learn from the reports of the CAD group ([ranks, columns]), equal on all its ranks."""
