"""RULER: thirteen tasks on long contexts, made offline from seeds."""

from meanbank.evaluation.ruler.evaluation import TASKS, Ruler

__all__ = ["TASKS", "Ruler"]
