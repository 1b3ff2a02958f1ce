"""Hugging Face classes: `MeanbankModel` and `MeanbankForCausalLM`."""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import ModelOutput, logging

from meanbank.core.context import Context
from meanbank.core.record import NOTHING
from meanbank.core.table import StoredTable
from meanbank.model.arrangement import Arrangement, arrange
from meanbank.model.backbone import StartValues
from meanbank.model.bank_storage import (
    check_not_mapped,
    chosen_storage,
    prefetch,
    read_whole,
    tables_left_out,
)
from meanbank.model.block import make_blocks
from meanbank.model.cache import MeanbankCache
from meanbank.model.config import MeanbankConfig
from meanbank.model.initialization import PLAIN, Draws, initialize_backbone, start_seed
from meanbank.model.inputs import (
    check_cache,
    check_documents,
    check_embeddings,
    check_positions,
    check_targets,
    check_token_ids,
    check_unknown,
    new_columns,
    one_of,
)
from meanbank.model.invariance import each_row, rows_alone
from meanbank.ops.cross_entropy import cross_entropy, linear_cross_entropy

logger = logging.get_logger(__name__)

PREFILL_CHUNK = 2048  # tokens of a prompt that are read at a time


class MeanbankPreTrainedModel(PreTrainedModel):
    """Loading, saving and start values."""

    config_class = MeanbankConfig
    config: MeanbankConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]

    def __init__(self, config: MeanbankConfig) -> None:
        super().__init__(config)
        self._start_seed = start_seed()  # drawn before any part is made: it depends on none

    @classmethod
    def from_pretrained(
        cls, *arguments: Any, bank_storage: str = "resident", **keywords: Any
    ) -> Self:
        """Load a model as `transformers` does.

        bank_storage: where its tables over token ids are: "resident", parameters like others;
        "mmap", in the model's safetensors files, of which only the rows of tokens that are read
        come into memory (the files must stay as they are); "int8", in memory, quantised with a
        scale a row and head, as `save_pretrained` then writes them. Rows of the last two are looked
        up on the CPU, and not trained. Raises ValueError for another name, and BankStorageError
        where the files have no such tables. Only safetensors are read, unless
        `use_safetensors=False` asks for others.
        """
        keywords.setdefault("use_safetensors", True)
        with chosen_storage(bank_storage):
            loaded = super().from_pretrained(*arguments, **keywords)
        model: Any = loaded[0] if isinstance(loaded, tuple) else loaded
        places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ValueError(
                "device_map may spread the blocks over devices but not offload them to cpu or "
                f"disk (yet), got {', '.join(sorted(places))}: give it more max_memory"
            )
        return cast(Self, loaded)

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, *rest: Any):
        """Hugging Face's step from a model without numbers and its files to a loaded one."""
        with tables_left_out(model, checkpoint_files):
            return PreTrainedModel._load_pretrained_model(
                model, state_dict, checkpoint_files, *rest
            )

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        check_not_mapped(self, Path(save_directory))
        backbone: Any = self.base_model
        with read_whole(backbone.stored_tables):
            super().save_pretrained(save_directory, *args, **kwargs)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        same = new_num_tokens in (None, self.config.vocab_size) and pad_to_multiple_of is None
        if self.config.needs_token_ids and not same:
            raise ValueError("a model with a bank cannot be resized: its tables have a row a token")
        return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        keywords = getattr(gradient_checkpointing_func, "keywords", {})
        if enable and keywords.get("use_reentrant"):
            raise ValueError(
                "use_reentrant=True does not apply: blocks read x0 and the values of other layers, "
                "whose gradients re-entrant checkpoints lose; leave it out"
            )
        never = functools.partial(gradient_checkpointing_func, use_reentrant=False)
        super()._set_gradient_checkpointing(enable, never, every_n_layers)

    @torch.no_grad()
    @init.guard_torch_init_functions()
    def initialize_weights(self) -> None:
        """Start values of everything that was not loaded; called when a model is made or loaded."""
        backbone: Any = self.base_model
        start = self._start_values()
        if not getattr(backbone, "_is_hf_initialized", False):
            initialize_backbone(
                start,
                backbone.embedding,
                backbone.stem,
                backbone.layers,
                backbone.norm,
                backbone.shared_table,
                backbone._start_seed,
            )
            backbone._is_hf_initialized = True
        if self is not backbone:
            head: Any = self.get_output_embeddings()
            with Draws(self._start_seed, head.weight.device).of("head"):
                start.head(head.weight)

    def _start_values(self) -> StartValues:
        plain = self.config.initialization == "plain"
        return PLAIN if plain else self.config.backbone_parts.start_values


class MeanbankModel(MeanbankPreTrainedModel):
    """The backbone without a head."""

    gradient_checkpointing = False  # Hugging Face sets it here and in every block
    stored_tables: tuple[StoredTable, ...] = ()  # those that are no parameters

    def __init__(self, config: MeanbankConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.stem = config.backbone_parts.stem(config.hidden_size)
        self.layers = make_blocks(config)
        self.norm = config.backbone_parts.norm(config.hidden_size)
        self.shared_table = None
        if config.has_shared_table:
            assert config.num_key_value_heads and config.value_head_dim  # filled in
            width = config.num_key_value_heads * config.value_head_dim
            self.shared_table = nn.Parameter(torch.empty(config.vocab_size, width))
        self.post_init()

    def new_cache(self) -> MeanbankCache:
        """An empty cache for this model."""
        return MeanbankCache(self.config)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embedding = value

    @rows_alone
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: MeanbankCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: MeanbankCache | None = None,
        document_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """Read T tokens that follow those in `cache`.

        input_ids (B, T); inputs_embeds (B, T, hidden_size) in their place where no layer has a
        bank. attention_mask: (B, T) or (B, columns seen + T), 0 at padding, which may stand
        anywhere: each row is read as if alone, and padding gets zeros. document_ids (B, T): where
        they change, also from call to call, a document begins, which sees nothing before itself;
        the cache then holds the last one. position_ids, if given, must be those that follow.
        `cache` and its older name `past_key_values` are the same. Raises ValueError otherwise.

        Of the output, hidden_states are x0, then the stream after each block, the last normalised.
        """
        check_unknown(kwargs)
        cache = one_of(cache, past_key_values)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if cache is None and self._wants_cache(use_cache):
            cache = self.new_cache()
        if input_ids is not None and not input_ids.is_floating_point():
            input_ids = input_ids if input_ids.dtype == torch.bool else input_ids.long()
        embedded = self._embed(input_ids, inputs_embeds)
        if input_ids is not None:
            prefetch(self.stored_tables, input_ids)
        batch, length = embedded.shape[:2]
        arrangement = self._arrangement(
            cache, batch, length, attention_mask, document_ids, position_ids
        )
        layout = arrangement.layout
        embedded = arrangement.aligned(embedded)
        if input_ids is not None:
            input_ids = arrangement.aligned(input_ids)

        old: list[Any] = [None] * (len(self.layers) + 1)
        if cache is not None:
            old[: len(cache.layers)] = (layer.state for layer in cache.layers)
        x, stem = self.stem(embedded, old[-1], layout)
        context = Context(input_ids, x, layout, shared_table=self.shared_table)
        hidden, states = [], []
        for block, before in zip(self.layers, old, strict=False):
            if output_hidden_states:
                hidden.append(arrangement.restored(x))
            x, context, state = block(x, context, before)
            if cache is not None:
                states.append(state)
        if cache is not None:  # all or nothing: an interrupted call leaves the cache as it was
            columns, documents = cache.seen + arrangement.length, tuple(arrangement.last_ids)
            for layer, state in zip(cache.layers, [*states, stem], strict=False):
                layer.store(state, columns, layout.total, documents)
        x = arrangement.restored(self.norm(x))
        output = BaseModelOutputWithPast(
            last_hidden_state=x,
            cache=cache,
            hidden_states=(*hidden, x) if output_hidden_states else None,
        )
        return output if _as_dict(return_dict, self.config) else output.to_tuple()

    def _wants_cache(self, use_cache: bool | None) -> bool:
        """Whether to begin a cache, where none was given."""
        wanted = self.config.use_cache if use_cache is None else use_cache
        if wanted and self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            logger.warning_once("training with activation checkpointing begins no cache")
            return False
        return wanted

    def _arrangement(
        self,
        cache: MeanbankCache | None,
        batch: int,
        length: int,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        position_ids: Tensor | None,
    ) -> Arrangement:
        """Where the tokens of a call stand; ValueError where its arguments do not fit."""
        seen, last_ids, columns = (0,) * batch, (None,) * batch, 0
        if cache is not None:
            check_cache(cache, self.config, batch)
            if cache.lengths:
                seen, last_ids, columns = cache.lengths, cache.documents, cache.seen
        mask = new_columns(attention_mask, batch, columns, length)
        check_documents(document_ids, batch, length)
        record = NOTHING if cache is None else cache.record
        arrangement = arrange(seen, length, mask, document_ids, last_ids, record)
        if position_ids is not None:
            check_positions(position_ids, arrangement)
        return arrangement

    def memory_nbytes_max(self, tokens: int, batch: int = 1, undo: int = 0) -> int:
        """Most bytes that a cache of this model holds within the first `tokens` tokens.

        undo: the tokens that it can forget again, see `MeanbankCache.crop`. In closed form and in
        the model's dtype; bank tables are parameters and not in it.
        """
        parts: list[Any] = [self.stem, *self.layers]
        return sum(part.state_nbytes_max(tokens, batch, self.dtype, undo) for part in parts)

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if input_ids is None:
            assert inputs_embeds is not None
            if self.config.needs_token_ids:
                raise ValueError(
                    "this model has a bank of values, which is indexed by token id: give "
                    "input_ids, not inputs_embeds"
                )
            check_embeddings(inputs_embeds, self.config.hidden_size)
            return inputs_embeds.to(self.embedding.weight.dtype)
        check_token_ids(input_ids, self.config.vocab_size)
        return self.embedding(input_ids)


@dataclasses.dataclass
class TargetLosses(ModelOutput):
    """What `MeanbankForCausalLM` gives for `targets`.

    loss: the sum of cross-entropies in nats, which has the gradient; losses: (B, T) of each
    position, without gradient, 0 where ignored.
    """

    loss: Tensor | None = None
    losses: Tensor | None = None
    cache: MeanbankCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class MeanbankForCausalLM(MeanbankPreTrainedModel, GenerationMixin):
    """Language model: the backbone and an untied head."""

    def __init__(self, config: MeanbankConfig) -> None:
        super().__init__(config)
        self.model = MeanbankModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: MeanbankCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        past_key_values: MeanbankCache | None = None,
        document_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        targets: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | TargetLosses | tuple:
        """Logits (B, T or logits_to_keep, vocab_size); see `MeanbankModel.forward`.

        labels (B, T): as input_ids, -100 is ignored; they are shifted here, as in any Hugging
        Face model, and the mean cross-entropy in nats is returned as `loss`; given
        num_items_in_batch, the sum divided by that (a trainer's count over accumulated batches).
        targets (B, T): for training, what each position is to predict, -100 is ignored: returns
        `TargetLosses` and never has the logits of all positions (unless `lm_head` was replaced or
        has hooks, which want them).
        """
        if targets is not None:
            tokens = input_ids if inputs_embeds is None else inputs_embeds
            check_targets(targets, tokens, labels, logits_to_keep, self.config.vocab_size)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=one_of(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            document_ids=document_ids,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        x = output.last_hidden_state
        if targets is not None:
            losses = self._target_losses(output, targets)
            return losses if _as_dict(return_dict, self.config) else losses.to_tuple()
        if isinstance(logits_to_keep, Tensor):
            x = x[:, logits_to_keep]
        elif logits_to_keep:
            x = x[:, -logits_to_keep:]
        logits = each_row(self._head, x)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=logits.shape[-1],
                num_items_in_batch=num_items_in_batch,
            )
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=output.cache, hidden_states=output.hidden_states
        )
        return result if _as_dict(return_dict, self.config) else result.to_tuple()

    @torch.no_grad()
    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: MeanbankCache | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> CausalLMOutputWithPast:
        """Read a prompt piece by piece: logits (B, 1, vocab_size) of its last column, and a cache.

        What it needs above the weights and the cache is that of `prefill_chunk` tokens, however
        long the prompt is; outputs are those of one pass up to rounding. No gradients; other
        arguments as in `MeanbankModel.forward`. Raises ValueError as it does.
        """
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1 token, got {prefill_chunk}")
        check_token_ids(input_ids, self.config.vocab_size)
        batch, length = input_ids.shape
        cache = one_of(cache, None)
        cache = self.model.new_cache() if cache is None else cache
        mask = new_columns(attention_mask, batch, cache.seen, length)
        check_documents(document_ids, batch, length)
        output: Any = None
        for start in range(0, length, prefill_chunk):
            part = slice(start, start + prefill_chunk)
            output = self(
                input_ids[:, part],
                attention_mask=None if mask is None else mask[:, part],
                document_ids=None if document_ids is None else document_ids[:, part],
                cache=cache,
                logits_to_keep=1,
            )
        return output

    def _head(self, x: Tensor) -> Tensor:
        logits = self.lm_head(x)
        softcap = self.config.backbone_parts.logit_softcap
        if softcap is None:
            return logits
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (precise / softcap).tanh_() * softcap  # a copy less of the largest tensor there is

    def _target_losses(self, output: Any, targets: Tensor) -> TargetLosses:
        x, head = output.last_hidden_state.flatten(0, 1), self.lm_head
        flat = targets.flatten().to(x.device, torch.long)
        if _is_plain(head):
            softcap = self.config.backbone_parts.logit_softcap
            total, losses = linear_cross_entropy(x, head.weight, flat, softcap=softcap)
        else:
            logits = self._head(x)
            total, losses = cross_entropy(logits, flat.to(logits.device))
        return TargetLosses(
            loss=total,
            losses=losses.view_as(targets),
            cache=output.cache,
            hidden_states=output.hidden_states,
        )

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        """Give `generate` our cache, whatever it would have made itself."""
        given = one_of(model_kwargs.get("cache"), model_kwargs.pop("past_key_values", None))
        implementation = generation_config.cache_implementation
        if implementation is not None:
            raise ValueError(
                f"cache_implementation={implementation!r} does not apply: a meanbank model brings "
                "its own cache; leave it out"
            )
        if given is None and generation_config.use_cache is not False:
            given = self.model.new_cache()
            if generation_config.is_assistant:  # a draft is taken back where it was wrong
                given.activate_past_recording()
        elif given is not None:
            given._is_user_defined = True  # pyright: ignore[reportAttributeAccessIssue]
        if given is not None:
            model_kwargs["cache"] = given
            if generation_config.prefill_chunk_size is None and "inputs_embeds" not in model_kwargs:
                generation_config.prefill_chunk_size = PREFILL_CHUNK


def _is_plain(head: nn.Module) -> bool:
    """Whether its weight is all there is to a head: not an adapter, and nobody watches it."""
    hooks = (head._forward_hooks, head._forward_pre_hooks)
    hooks += (head._backward_hooks, head._backward_pre_hooks)
    own = any(hooks) or "forward" in vars(head)
    return type(head) is nn.Linear and head.bias is None and not own


def _as_dict(return_dict: bool | None, config: MeanbankConfig) -> bool | None:
    return config.return_dict if return_dict is None else return_dict
