"""A mode in which a row's numbers do not depend on the rows beside it, to the last bit."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from meanbank.model.cache import MeanbankCache
from meanbank.model.inputs import check_cache, one_of

_depth = 0  # of nested `batch_invariant` blocks
BY_ROW = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "document_ids")


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Within it, models read the rows of a batch one by one, so each gets the bits it gets alone.

    Otherwise the shape of a product decides how it is summed, and a row's fp32 logits differ in
    their last bits between batch sizes. Here rows only share the call: it takes as long as all of
    them one after the other, and copies their memories each time. It holds for inference in fp32
    on a CPU with one build of PyTorch and one number of threads, for any memory and value source,
    padding included (of `generate`, and of logits as long as inputs have the same width). It is
    switched on for the whole process, and not for a compiled model.

    >>> with meanbank.batch_invariant():
    ...     text = model.generate(prompts, attention_mask=mask, max_new_tokens=16)
    """
    global _depth  # noqa: PLW0603
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def rows_alone(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `MeanbankModel.forward` read rows one by one where that is switched on."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def wrapped(self, *args: Any, **kwargs: Any) -> Any:
        if not _depth:
            return forward(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        del arguments["self"]
        arguments |= arguments.pop("kwargs", {})
        inputs = arguments.get("input_ids")
        inputs = arguments.get("inputs_embeds") if inputs is None else inputs
        if inputs is None or inputs.ndim < 2 or len(inputs) < 2:
            return forward(self, **arguments)
        return _each_row(functools.partial(forward, self), self, arguments, len(inputs))

    return wrapped


def _each_row(forward: Callable[..., Any], model: Any, arguments: dict, batch: int) -> Any:
    cache = one_of(arguments.pop("cache", None), arguments.pop("past_key_values", None))
    return_dict = arguments.pop("return_dict", None)
    if cache is not None:
        check_cache(cache, model.config, batch)
    outputs = []
    for row in range(batch):
        part = {name: _part(name, value, row, batch) for name, value in arguments.items()}
        before = cache and (cache.select([row]) if cache.lengths else cache.emptied())
        outputs.append(forward(**part, cache=before, return_dict=True))
    if outputs[0].cache is not None:  # all or nothing, as in `forward`
        cache = model.new_cache() if cache is None else cache
        cache.take(MeanbankCache.join([output.cache for output in outputs]))
    hidden = None
    if outputs[0].hidden_states is not None:
        layers = zip(*(output.hidden_states for output in outputs), strict=True)
        hidden = tuple(torch.cat(rows) for rows in layers)
    whole = BaseModelOutputWithPast(
        last_hidden_state=torch.cat([output.last_hidden_state for output in outputs]),
        cache=cache,
        hidden_states=hidden,
    )
    as_dict = model.config.return_dict if return_dict is None else return_dict
    return whole if as_dict else whole.to_tuple()


def _part(name: str, value: Any, row: int, batch: int) -> Any:
    if name not in BY_ROW or not isinstance(value, Tensor) or value.ndim < 2:
        return value
    return value[row : row + 1].clone() if len(value) == batch else value


def each_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), for one row of the batch at a time where that is switched on."""
    if not _depth:
        return function(x)
    return torch.cat([function(x[row : row + 1].clone()) for row in range(len(x))])
