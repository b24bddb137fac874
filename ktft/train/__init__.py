"""Training: one straight path from a recipe to an adapter through the Hugging Face ``Trainer``.

``run`` is the path, ``trainer`` the Trainer with the few things it does differently, ``callbacks`` the progress bar,
the log and Ctrl-C, ``score`` exact-match scoring, ``report`` the summary and the loss plot.
"""

from ktft.train.report import Summary
from ktft.train.run import run
from ktft.train.score import Score, exact_match

__all__ = ["Score", "Summary", "exact_match", "run"]
