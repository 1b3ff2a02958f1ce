"""How a job comes to its model: it is trained here, or it exists already."""

import abc
import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from meanbank.core.config import to_plain
from meanbank.core.files import read_object, write_json
from meanbank.core.provenance import produced_by
from meanbank.data import Corpus, DataConfig, prepare_corpus
from meanbank.data.tokenizer import HUB
from meanbank.evaluation import Subject
from meanbank.model import MeanbankConfig
from meanbank.model.accounting import empty_model
from meanbank.studies.evaluations import (
    Evaluated,
    of_model,
    of_run,
    outline_of_model,
    place_of,
    texts_of,
)
from meanbank.studies.spec import ExistingModel
from meanbank.training import RunConfig, load_run, train
from meanbank.training.checkpoint import TOKENIZER, checkpoints
from meanbank.training.metrics import last_tokens, training_seconds
from meanbank.training.planning import model_of, training_flops, training_tokens
from meanbank.training.run import (
    CONFIG,
    METRICS,
    check_resumable,
    choose_device,
    run_info,
    subject_of,
)

MODEL = "model.json"
# Of what produced a run; older runs do not say their machine.
FACTS = ("version", "commit", "python", "torch", "device", "machine", "dtype", "threads", "seed")


def facts_in(record: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `FACTS` that it has."""
    return {name: record[name] for name in FACTS if name in record}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """What is known of a model that is there; what is None is not known or is of training.

    seconds: of training. curve: its metrics, a file in the folder. model: of one that was not
    trained here, where it is from and what tells it from others.
    """

    parameters: int
    produced_by: dict[str, Any]
    tokens: int | None = None
    flops: float | None = None
    seconds: float | None = None
    curve: str | None = None
    model: dict[str, Any] | None = None


class Origin(abc.ABC):
    """Where the model of a job's folder is from."""

    folder: Path

    @property
    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """JSON values that tell it from others."""

    @property
    @abc.abstractmethod
    def data(self) -> DataConfig | None:
        """The texts that it is evaluated on, to be prepared; None where there are none."""

    @property
    @abc.abstractmethod
    def tokens(self) -> int:
        """Tokens that are trained on."""

    @abc.abstractmethod
    def tokens_done(self) -> int:
        """Those that were trained on so far."""

    @abc.abstractmethod
    def flops(self) -> float:
        """Those of training."""

    @abc.abstractmethod
    def outline(self, corpus: Corpus | None) -> Subject:
        """The model without weights, with the texts of `data`; ValueError where there is none."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise ValueError where the folder holds what was made otherwise."""

    @abc.abstractmethod
    def is_made(self) -> bool:
        """Whether the model is there."""

    @abc.abstractmethod
    def make(self) -> None:
        """Have the model there; goes on with what an earlier try left."""

    @abc.abstractmethod
    def evaluated(self) -> Evaluated:
        """The model with its weights."""

    @abc.abstractmethod
    def facts(self) -> Made:
        """What a result says of it, once it is made."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained(Origin):
    """A run, trained in the folder."""

    folder: Path
    config: RunConfig

    @property
    def settings(self) -> dict[str, Any]:
        return self.config.plain()

    @property
    def data(self) -> DataConfig | None:
        return None if self.config.data.recall is not None else self.config.data

    @property
    def tokens(self) -> int:
        return training_tokens(self.config)

    def tokens_done(self) -> int:
        return min(self.tokens, last_tokens(self.folder / METRICS))

    def flops(self) -> float:
        return training_flops(model_of(self.config), self.config)

    def outline(self, corpus: Corpus | None) -> Subject:
        return subject_of(self.config, model_of(self.config), corpus)

    def check(self) -> None:
        if (self.folder / MODEL).is_file():
            raise ValueError(f"{self.folder} is of a model that was not trained there")
        if (self.folder / CONFIG).is_file():
            check_resumable(self.folder, self.config)

    def is_made(self) -> bool:
        found = checkpoints(self.folder)
        return bool(found) and found[-1].name == f"step-{self.config.training.steps:06d}"

    def make(self) -> None:
        train(self.config, self.folder, resume=(self.folder / CONFIG).is_file())

    def evaluated(self) -> Evaluated:
        return of_run(load_run(self.folder, self.config.training.device))

    def facts(self) -> Made:
        info = run_info(self.folder)
        model = empty_model(MeanbankConfig.from_pretrained(checkpoints(self.folder)[-1]))
        return Made(
            parameters=info["parameters"],
            produced_by=facts_in(info),
            tokens=last_tokens(self.folder / METRICS),
            flops=training_flops(model, self.config),
            seconds=training_seconds(self.folder / METRICS),
            curve=METRICS,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Existing(Origin):
    """A model from elsewhere; FOLDER/model.json tells which, and that it is still the same."""

    folder: Path
    model: ExistingModel

    @property
    def settings(self) -> dict[str, Any]:
        return to_plain(self.model)

    @property
    def data(self) -> DataConfig | None:
        place_of(self.model.name)  # told where there is none, rather than that of its tokenizer
        return None if self.model.data is None else texts_of(self.model.data, self.model.name)

    @property
    def tokens(self) -> int:
        return 0

    def tokens_done(self) -> int:
        return 0

    def flops(self) -> float:
        return 0.0

    def outline(self, corpus: Corpus | None) -> Subject:
        return outline_of_model(self.model.name, corpus, self.model.bos)

    def check(self) -> None:
        if (self.folder / CONFIG).is_file():
            raise ValueError(f"{self.folder} is of a run that was trained there")
        if not self.is_made() or files_fingerprint(self.model.name) is None:
            return  # what is gone cannot have changed, and its results stay
        made = read_object(self.folder / MODEL)
        for name, now in self._identity().items():
            if made.get(name) != now:
                raise ValueError(
                    f"{self.folder} was made with another {name} of {self.model.name}: "
                    f"{str(made.get(name))[:12]}, not {str(now)[:12]}"
                )

    def is_made(self) -> bool:
        return (self.folder / MODEL).is_file()

    def make(self) -> None:
        model = self.outline(None).model
        dtype = str(model.dtype).removeprefix("torch.")
        made = {
            "name": self.model.name,
            "data": self.model.data,
            **self._identity(),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            **produced_by(device=choose_device("auto"), dtype=dtype, seed=None),
        }
        write_json(self.folder / MODEL, made)

    def evaluated(self) -> Evaluated:
        self.check()
        return of_model(self.model.name, self.folder, data=self.model.data, bos=self.model.bos)

    def facts(self) -> Made:
        made = read_object(self.folder / MODEL)
        model = {name: value for name, value in made.items() if name not in (*FACTS, "parameters")}
        return Made(parameters=made["parameters"], produced_by=facts_in(made), model=model)

    def _identity(self) -> dict[str, Any]:
        """What may not change meanwhile: the model's files, its texts, how they begin."""
        data = self.data
        return {
            "fingerprint": files_fingerprint(self.model.name),
            "texts": None if data is None else prepare_corpus(data).fingerprint,
            "bos": self.model.bos,
        }


def files_fingerprint(name: str) -> str | None:
    """The commit of a model of the hub, or a sha256 of a folder's weights, sizes and tokenizer.

    None where the model is not there.
    """
    if name.startswith(HUB):
        try:
            return Path(hf_hub_download(name.removeprefix(HUB), "config.json")).parent.name
        except (OSError, ValueError):  # no network, or no such model
            return None
    folder, digest = Path(name), hashlib.sha256()
    if not (folder / "config.json").is_file():
        return None
    for path in sorted([folder / "config.json", folder / TOKENIZER, *folder.glob("*.safetensors")]):
        if path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()


def origin_of(made_from: RunConfig | ExistingModel, folder: Path) -> Origin:
    """A run of a configuration, or a model that exists, in the folder of a job."""
    if isinstance(made_from, RunConfig):
        return Trained(folder=folder, config=made_from)
    return Existing(folder=folder, model=made_from)
