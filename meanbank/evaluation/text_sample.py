"""What a model writes, for people to look at."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from meanbank.evaluation.base import (
    Evaluation,
    Record,
    Sample,
    Subject,
    check_seed,
    prompt_hash,
)
from meanbank.evaluation.generation import SamplingSettings
from meanbank.evaluation.losses import check_positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSample(Evaluation, tag="samples"):
    """A continuation of each prompt; temperature 0 is greedy. Nothing is scored."""

    prompts: tuple[str, ...] = ("def read_lines(path):\n",)
    max_new_tokens: int = 96
    temperature: float = 0.8
    top_p: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("prompts needs at least one")
        check_seed(self.seed)
        self.sampling()

    def sampling(self) -> SamplingSettings:
        """How tokens are drawn; ValueError for settings that make no sense."""
        return SamplingSettings(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
        )

    def samples(self, subject: Subject) -> list[Sample]:
        for prompt in self.prompts:
            if not subject.encode(prompt):
                raise ValueError(f"a prompt is empty, and nothing comes before it: {prompt!r}")
        return [Sample(id=str(n), content=prompt) for n, prompt in enumerate(self.prompts)]

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        return [self._go_on(subject, sample.content) for sample in samples]

    def _go_on(self, subject: Subject, prompt: str) -> Record:
        ids = torch.tensor([subject.encode(prompt)], device=subject.model.device)
        check_positions(subject.model, ids.shape[1] + self.max_new_tokens)
        torch.manual_seed(self.seed)
        model: Any = subject.model
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.max_new_tokens,
            **self.sampling().keywords(),
        )
        new = written[0, ids.shape[1] :].tolist()
        text = subject.text_tokenizer().decode(new)
        return {"prompt": prompt_hash(prompt), "asked": prompt, "text": text, "tokens": len(new)}

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        return {"samples": [{"prompt": r["asked"], "text": r["text"]} for r in records]}

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        return {}
