"""Hugging Face classes: `MeanbankModel` and `MeanbankForCausalLM`."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from meanbank.core.context import Context
from meanbank.memory.operator import OperatorMemory
from meanbank.model.arrangement import Arrangement, arrange
from meanbank.model.attention import SoftmaxAttention
from meanbank.model.backbone import StartValues
from meanbank.model.block import Block, make_blocks
from meanbank.model.cache import UNDO, MeanbankCache
from meanbank.model.config import MeanbankConfig
from meanbank.model.initialization import PLAIN, initialize_backbone


class MeanbankPreTrainedModel(PreTrainedModel):
    """Loading, saving and start values."""

    config_class = MeanbankConfig
    config: MeanbankConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False
    _no_split_modules = ["Block"]

    def resize_token_embeddings(self, *arguments: Any, **keywords: Any) -> nn.Embedding:
        if self.config.needs_token_ids:
            raise ValueError("a model with a bank cannot be resized: its tables have a row a token")
        return super().resize_token_embeddings(*arguments, **keywords)

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
            )
            backbone._is_hf_initialized = True
        if self is not backbone:
            head: Any = self.get_output_embeddings()
            start.head(head.weight)

    def _start_values(self) -> StartValues:
        plain = self.config.initialization == "plain"
        return PLAIN if plain else self.config.backbone_parts.start_values


class MeanbankModel(MeanbankPreTrainedModel):
    """The backbone without a head."""

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
        chunks = [
            block.attention.memory.window.size
            for block in cast(Iterable[Block], self.layers)
            if isinstance(block.attention, SoftmaxAttention)
            and isinstance(block.attention.memory, OperatorMemory)
        ]
        return MeanbankCache(len(self.layers) + self.stem.carries, max([UNDO, *chunks]))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embedding = value

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
        they change, a document begins, which sees nothing before itself; a row's first document
        goes on from the cache, and the cache then holds the last one. position_ids, if given, must
        be those that follow. `cache` and its older name `past_key_values` are the same. Raises
        ValueError otherwise.
        """
        _check_unknown(kwargs)
        cache = _one_of(cache, past_key_values)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if cache is None and use_cache:
            cache = self.new_cache()
        if input_ids is not None and input_ids.dtype in (torch.uint8, torch.int8, torch.int16):
            input_ids = input_ids.long()
        embedded = self._embed(input_ids, inputs_embeds)
        batch, length = embedded.shape[:2]
        if cache is not None:
            _check_cache(cache, len(self.new_cache().layers), batch)
        seen = (0,) * batch if cache is None else cache.lengths or (0,) * batch
        columns = 0 if cache is None else cache.seen
        mask = _new_columns(attention_mask, batch, columns, length)
        _check_documents(document_ids, batch, length)
        undo = 0 if cache is None else cache.undo
        arrangement = arrange(seen, length, mask, document_ids, undo)
        layout = arrangement.layout
        _check_positions(position_ids, arrangement)
        embedded = arrangement.aligned(embedded)
        if input_ids is not None:
            input_ids = arrangement.aligned(input_ids)

        old: list[Any] = [None] * (len(self.layers) + 1)
        if cache is not None:
            old[: len(cache.layers)] = (layer.state for layer in cache.layers)
        x, stem = self.stem(embedded, old[-1], layout)
        context = Context(input_ids, x, layout, shared_table=self.shared_table)
        hidden, states = [x], []
        for block, before in zip(self.layers, old, strict=False):
            x, context, state = block(x, context, before)
            states.append(state)
            hidden.append(x)
        if cache is not None:  # all or nothing: an interrupted call leaves the cache as it was
            for layer, state in zip(cache.layers, [*states, stem], strict=False):
                layer.store(state, columns + length, layout.total)
        x = arrangement.restored(self.norm(x))
        hidden = tuple(map(arrangement.restored, hidden)) if output_hidden_states else None
        output = BaseModelOutputWithPast(last_hidden_state=x, cache=cache, hidden_states=hidden)
        return output if return_dict in (None, True) else output.to_tuple()

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
            return inputs_embeds
        if input_ids.ndim != 2 or input_ids.numel() == 0:
            raise ValueError(
                f"input_ids must be (batch, tokens) with at least one token, got shape "
                f"{tuple(input_ids.shape)}"
            )
        if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            raise ValueError(f"input_ids must be integers, got {input_ids.dtype}")
        low, high = (int(bound) for bound in input_ids.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(
                f"token id {wrong} is outside the vocabulary (0 to {self.config.vocab_size - 1})"
            )
        return self.embedding(input_ids)


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
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        past_key_values: MeanbankCache | None = None,
        document_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits (B, T or logits_to_keep, vocab_size); see `MeanbankModel.forward`.

        labels (B, T): as input_ids, -100 is ignored; they are shifted here, as in any Hugging
        Face model, and the mean cross-entropy in nats is returned as `loss`.
        """
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=_one_of(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            document_ids=document_ids,
            output_hidden_states=kwargs.pop("output_hidden_states", None),
            **kwargs,
        )
        x = output.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            x = x[:, logits_to_keep]
        elif logits_to_keep:
            x = x[:, -logits_to_keep:]
        logits = self.lm_head(x)
        softcap = self.config.backbone_parts.logit_softcap
        if softcap is not None:
            precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logits = softcap * torch.tanh(precise / softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=output.cache, hidden_states=output.hidden_states
        )
        return result if return_dict in (None, True) else result.to_tuple()

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        """Give `generate` our cache, whatever it would have made itself."""
        given = _one_of(model_kwargs.get("cache"), model_kwargs.pop("past_key_values", None))
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


def _one_of(cache: Any, past_key_values: Any) -> MeanbankCache | None:
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("cache and past_key_values are two names of one argument; give one")
    cache = past_key_values if cache is None else cache
    if cache is not None and not isinstance(cache, MeanbankCache):
        raise ValueError(f"the cache must be a MeanbankCache, got {type(cache).__name__}")
    return cache


IGNORED_KEYWORDS = {"num_items_in_batch", "output_attentions", "output_router_logits"}


def _check_unknown(keywords: dict[str, Any]) -> None:
    """Refuse what we do not know: silently dropped inputs give silently wrong results."""
    if keywords.get("output_attentions"):
        raise ValueError("output_attentions is not supported: attention weights are not kept")
    for name, value in keywords.items():
        if name not in IGNORED_KEYWORDS and value is not None:
            raise ValueError(f"the model does not take {name!r}: it is not supported (yet)")


def _check_cache(cache: MeanbankCache, num_layers: int, batch: int) -> None:
    if len(cache.layers) != num_layers:
        raise ValueError(f"the cache has {len(cache.layers)} layers, the model {num_layers}")
    if cache.lengths and len(cache.lengths) != batch:
        raise ValueError(f"the cache holds {len(cache.lengths)} sequences, the input {batch}")


def _new_columns(mask: Tensor | None, batch: int, columns: int, length: int) -> Tensor | None:
    """The part of an attention mask that belongs to the new tokens."""
    if mask is None:
        return None
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] not in (length, columns + length):
        raise ValueError(
            f"attention_mask must have shape ({batch}, {columns + length}), got {tuple(mask.shape)}"
        )
    return mask[:, -length:]


def _check_documents(document_ids: Tensor | None, batch: int, length: int) -> None:
    if document_ids is not None and document_ids.shape != (batch, length):
        raise ValueError(
            f"document_ids must have shape ({batch}, {length}), got {tuple(document_ids.shape)}"
        )


def _check_positions(position_ids: Tensor | None, arrangement: Arrangement) -> None:
    if position_ids is None:
        return
    layout, length = arrangement.layout, arrangement.length
    expected = layout.positions(position_ids.device).expand(layout.batch, layout.length)
    given = position_ids.expand(layout.batch, -1) if position_ids.ndim else position_ids
    wrong = given.shape[-1] != length
    if not wrong:
        given = arrangement.aligned(given)
        differ = given != expected
        wrong = bool((differ if arrangement.valid is None else differ & arrangement.valid).any())
    if wrong:
        raise ValueError(
            "position_ids contradict the tokens seen: they must count each row's tokens, those in "
            f"the cache ({', '.join(map(str, sorted(set(layout.seen))))}) included"
        )
