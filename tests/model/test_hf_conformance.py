"""What transformers' own modelling tests check of every model (tests/test_modeling_common.py).

Generation is in test_hf_generation.py, checkpointing in test_checkpointing.py, compilation in
test_compile.py, half precision in test_precision.py. Not applicable, because these models
- keep no attention weights: attention outputs, retained attention gradients, head masks, pruning;
- bring operators of their own: dispatch to sdpa, flash and flex attention, 4D masks;
- have neither dropout, rope scaling, position tables, chunked feed-forwards, tied weights;
- are language models only: sequence and token classification, question answering, encoders;
- are one process's: tensor and pipeline plans, quantisers;
- keep opaque states: a cache of key and value tensors, static and quantised caches;
- leave their operators out of the graph: full graphs and export.
Those that a user can ask for raise a clear error, which test_huggingface.py tests.
"""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from meanbank import MeanbankConfig, MeanbankForCausalLM, MeanbankModel
from tests.model.hf_models import (
    SYSTEMS,
    VOCABULARY,
    WITHOUT_BANK,
    left_padded,
    make_system,
    random_ids,
)

every_system = pytest.mark.parametrize("system", SYSTEMS)


@every_system
def test_configurations_round_trip(system, tmp_path):
    config = make_system(system).config
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.to_dict() == {**config.to_dict(), "_name_or_path": again._name_or_path}
    assert MeanbankConfig.from_json_file(tmp_path / "config.json").layers == config.layers
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert copied.to_dict() == config.to_dict()
    assert MeanbankConfig(**config.to_dict()).layers == config.layers
    assert "layers" in config.to_diff_dict()


@every_system
def test_save_and_load_in_shards(system, tmp_path):
    model, ids = make_system(system), random_ids(2, 19)
    expected = model(ids).logits
    for folder, size in ((tmp_path / "one", "1GB"), (tmp_path / "many", "5KB")):
        model.save_pretrained(folder, max_shard_size=size)
        again, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        assert not again.training
        for name, weight in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], weight), name
        # where in memory weights stand decides how products are summed
        assert torch.allclose(again(ids).logits, expected, atol=1e-5)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1


def test_missing_unexpected_and_mismatched_weights_are_reported(tmp_path):
    model = make_system("kvm_bank")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    weights["something.else"] = torch.ones(3)
    save_file(weights, file, metadata={"format": "pt"})
    again, report = MeanbankForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {"model.norm.weight"}
    assert set(report["unexpected_keys"]) == {"something.else"}
    assert torch.equal(again.model.norm.weight, torch.ones(24))
    weights["lm_head.weight"] = torch.ones(3, 24)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="mismatch"):
        MeanbankForCausalLM.from_pretrained(tmp_path)
    again, report = MeanbankForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, ignore_mismatched_sizes=True
    )
    assert len(report["mismatched_keys"]) == 1
    assert torch.isfinite(again.lm_head.weight).all()


@every_system
def test_every_missing_weight_gets_a_start_value(system, tmp_path):
    model = make_system(system)
    model.save_pretrained(tmp_path, state_dict={"lm_head.weight": model.lm_head.weight})
    again = MeanbankForCausalLM.from_pretrained(tmp_path)
    for name, parameter in again.named_parameters():
        assert torch.isfinite(parameter).all(), name
    assert torch.isfinite(again(random_ids(1, 12)).logits).all()


@every_system
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_loading_in_another_dtype(system, dtype, tmp_path):
    model = make_system(system)
    model.save_pretrained(tmp_path / "single")
    again = MeanbankForCausalLM.from_pretrained(tmp_path / "single", dtype=dtype)
    # no parameter is kept in fp32: operators sum in fp32 or better whatever the weights
    assert {parameter.dtype for parameter in again.parameters()} == {dtype}
    assert again.dtype == again.config.dtype == dtype
    again.save_pretrained(tmp_path / "other")
    assert MeanbankForCausalLM.from_pretrained(tmp_path / "other", dtype="auto").dtype == dtype
    assert MeanbankForCausalLM.from_pretrained(tmp_path / "single", dtype="auto").dtype == (
        torch.float32
    )


@every_system
def test_made_without_memory_and_from_a_configuration(system):
    model = make_system(system)
    with torch.device("meta"):
        empty = MeanbankForCausalLM(model.config)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in empty.state_dict().items()} == shapes
    made = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    assert made.dtype == torch.bfloat16
    assert all(torch.isfinite(parameter).all() for parameter in made.parameters())


@every_system
def test_the_same_every_time_in_training_or_not_and_in_a_copy(system):
    model, ids = make_system(system), random_ids(2, 21)
    first = model(ids).logits
    assert torch.equal(model(ids).logits, first)
    assert torch.equal(copy.deepcopy(model)(ids).logits, first)
    assert torch.equal(model.train()(ids).logits, first)  # there is no dropout
    with torch.inference_mode():
        again = model(ids).logits  # without gradients KVM may take another backend
        assert torch.equal(model(ids).logits, again)
        assert (again - first).abs().max() <= 1e-5


@every_system
def test_hidden_states(system):
    model, ids = make_system(system), random_ids(2, 13)
    output = model.model(ids, output_hidden_states=True)
    assert [tuple(x.shape) for x in output.hidden_states] == [(2, 13, 24)] * 3
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    model.config.output_hidden_states = True
    assert torch.equal(model(ids).hidden_states[1], output.hidden_states[1])
    ids, mask = left_padded([random_ids(1, 9)[0], random_ids(1, 4)[0]])
    assert not model(ids, attention_mask=mask).hidden_states[1][1, :5].any()  # zeros at padding


@every_system
def test_tuples_in_place_of_dictionaries(system):
    model, ids = make_system(system), random_ids(2, 11)
    named = model(ids, labels=ids, output_hidden_states=True)
    loss, logits, cache, hidden = model(
        ids, labels=ids, output_hidden_states=True, return_dict=False
    )
    assert torch.equal(loss, named.loss)
    assert torch.equal(logits, named.logits)
    assert all(map(torch.equal, hidden, named.hidden_states))
    assert cache.lengths == named.cache.lengths
    model.config.return_dict = False
    assert torch.equal(model(ids, use_cache=False)[0], logits)
    assert torch.equal(model.model(ids)[0], hidden[-1])
    assert torch.equal(model(ids, return_dict=True).logits, logits)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 13)


@every_system
def test_a_cache_or_none(system):
    model, ids = make_system(system), random_ids(2, 11)
    assert model(ids).cache is not None
    assert model(ids, use_cache=False).cache is None
    model.config.use_cache = False
    assert model(ids).cache is None
    assert torch.equal(model(ids).logits, model(ids, use_cache=True).logits)


@pytest.mark.parametrize("system", WITHOUT_BANK)
def test_embeddings_equal_ids(system):
    model, ids = make_system(system), random_ids(2, 15)
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embedded).logits, model(ids).logits)
    left, mask = left_padded([ids[0], ids[1, :6]])
    embedded = model.get_input_embeddings()(left)
    expected = model(left, attention_mask=mask).logits
    assert torch.equal(model(inputs_embeds=embedded, attention_mask=mask).logits, expected)


@every_system
def test_getters_and_setters(system):
    model = make_system(system)
    assert model.get_input_embeddings() is model.model.embedding
    assert model.get_output_embeddings() is model.lm_head
    assert model.get_decoder() is model.base_model is model.model
    model.set_input_embeddings(torch.nn.Embedding(7, 24))
    assert model.model.get_input_embeddings().weight.shape == (7, 24)
    head = torch.nn.Linear(24, 7, bias=False)
    model.set_output_embeddings(head)
    assert model.lm_head is head
    assert model.main_input_name == "input_ids"
    assert next(iter(inspect.signature(model.forward).parameters)) == "input_ids"
    assert isinstance(model, PreTrainedModel)
    assert MeanbankModel(model.config).get_output_embeddings() is None


@pytest.mark.parametrize("system", WITHOUT_BANK)
def test_resizing_the_vocabulary(system, tmp_path):
    model, ids = make_system(system), random_ids(1, 9)
    before = model(ids).logits
    for size in (VOCABULARY + 5, VOCABULARY):
        model.resize_token_embeddings(size, mean_resizing=False)
        assert len(model.lm_head.weight) == len(model.model.embedding.weight) == size
        assert model.config.vocab_size == size
        assert torch.allclose(model(ids).logits[..., :VOCABULARY], before, atol=1e-6)
    model.resize_token_embeddings(pad_to_multiple_of=64)
    model.save_pretrained(tmp_path)
    again = MeanbankForCausalLM.from_pretrained(tmp_path)
    assert again(torch.tensor([[63]])).logits.shape == (1, 1, 64)


def test_a_bank_keeps_its_vocabulary():
    model = make_system("kvm_bank")
    for arguments in ((45,), (30,), (None, 64)):
        with pytest.raises(ValueError, match="cannot be resized"):
            model.resize_token_embeddings(*arguments)
    assert model.resize_token_embeddings() is model.model.embedding
    assert model.resize_token_embeddings(VOCABULARY) is model.model.embedding


@every_system
def test_the_loss_is_the_mean_over_next_tokens(system):
    model, ids = make_system(system), random_ids(3, 12)
    labels = ids.clone()
    labels[0, 5:], labels[2, :3] = -100, -100
    output = model(ids, labels=labels)
    logits, targets = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    expected = F.cross_entropy(logits, targets)
    assert torch.allclose(output.loss, expected)
    count = int((targets != -100).sum())
    accumulated = sum(  # as a trainer accumulates batches of unequal counts
        model(ids[rows], labels=labels[rows], num_items_in_batch=torch.tensor(count)).loss
        for rows in (slice(0, 1), slice(1, 3))
    )
    assert torch.allclose(accumulated, expected)


@every_system
def test_masks_and_positions(system):
    """Any way of saying the same: no mask, ones, bools, padding by one column, positions."""
    model, ids = make_system(system), random_ids(2, 12)
    expected = model(ids).logits
    ones = torch.ones_like(ids)
    positions = torch.arange(12)
    for arguments in (
        {"attention_mask": ones},
        {"attention_mask": ones.bool(), "position_ids": positions[None]},
        {"attention_mask": ones.float(), "position_ids": positions.expand(2, -1)},
        {"position_ids": positions},
    ):
        assert torch.equal(model(ids, **arguments).logits, expected)
    pad = torch.zeros(2, 1, dtype=torch.long)
    mask = torch.cat([pad, ones], dim=1)
    padded = model(
        torch.cat([pad, ids], dim=1),
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).masked_fill(mask == 0, 1),
    )
    assert torch.allclose(padded.logits[:, 1:], expected, atol=1e-5)
    right = model(
        torch.cat([ids, pad], dim=1), attention_mask=torch.cat([ones, pad], dim=1)
    ).logits[:, :-1]
    assert torch.allclose(right, expected, atol=1e-5)


@every_system
def test_a_batch_equals_its_rows(system):
    model, ids = make_system(system), random_ids(3, 17)
    together = model(ids, output_hidden_states=True)
    for row in range(3):
        alone = model(ids[row : row + 1], output_hidden_states=True)
        assert torch.allclose(alone.logits[0], together.logits[row], atol=1e-5)
        for ours, theirs in zip(alone.hidden_states, together.hidden_states, strict=True):
            assert torch.allclose(ours[0], theirs[row], atol=1e-5)


@every_system
def test_overfitting_one_batch(system):
    model, ids = make_system(system).train(), random_ids(2, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses = []
    for _ in range(20):
        loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0], losses
