"""Random search (Bergstra and Bengio 2012): every trial is drawn independently of all others."""

from typing import Literal

from tasks.search.methods.base import MethodConfig, SearchPlan, WholeTrainings


class RandomConfig(MethodConfig):
    """Random search (Bergstra and Bengio 2012, JMLR 13)."""

    kind: Literal["random"] = "random"

    def build(self, plan: SearchPlan) -> "RandomSearch":
        """The method; it can search any space."""
        return RandomSearch(plan)


class RandomSearch(WholeTrainings):
    """Draws each trial at random."""
