"""CORE: the metric of DCLM over 21 tasks of knowledge, language and symbols."""

from meanbank.evaluation.core_tasks.evaluation import Core

__all__ = ["Core"]
