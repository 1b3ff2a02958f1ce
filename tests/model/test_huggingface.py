"""The Hugging Face face of the model: saving, loading, generating, caches, clear errors."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from meanbank import MeanbankCache, MeanbankConfig, MeanbankForCausalLM, MeanbankModel

PLAN = [
    {"memory": {"type": "kvm", "chunk_size": 4, "budget": {"type": "power_law", "factor": 2}}},
    {"where": [0], "memory": {"type": "block_window", "block_size": 4, "blocks": 2}},
    {"where": "last_third", "values": {"type": "bank"}},
]


def make_model(plan=PLAN, **settings) -> MeanbankForCausalLM:
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = MeanbankConfig(**{**sizes, "plan": plan, "residual_scale": 1.0, **settings})
    model = MeanbankForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def counted(model: MeanbankForCausalLM, monkeypatch) -> list[int]:
    """Lengths of the inputs that the model is called with."""
    lengths: list[int] = []
    forward = model.model.forward

    def watch(**arguments):
        lengths.append(arguments["input_ids"].shape[1])
        return forward(**arguments)

    monkeypatch.setattr(model.model, "forward", watch)
    return lengths


def test_save_and_load_round_trip(tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    ids = torch.randint(50, (1, 30))
    expected = model(ids).logits
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, MeanbankForCausalLM)
    assert again.config.layers == model.config.layers
    assert torch.equal(again(ids).logits, expected)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), MeanbankConfig)
    backbone = AutoModel.from_pretrained(tmp_path)
    assert isinstance(backbone, MeanbankModel)
    assert torch.equal(backbone.embedding.weight, model.model.embedding.weight)


def test_loading_draws_start_values_for_missing_weights_only(tmp_path):
    model = make_model()
    weights = dict(model.state_dict())
    table = weights["model.layers.2.attention.values.table"]
    del weights["lm_head.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    again = MeanbankForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.model.layers[2].attention.values.table, table)
    assert 0.05 < again.lm_head.weight.std() < 0.5


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "top_k": 0}])
def test_generate_equals_decoding_without_cache(settings, monkeypatch):
    model = make_model()
    prompt = torch.randint(50, (2, 9))
    torch.manual_seed(1)
    slow = model.generate(prompt, max_new_tokens=30, use_cache=False, **settings)
    torch.manual_seed(1)
    lengths = counted(model, monkeypatch)
    fast = model.generate(prompt, max_new_tokens=30, **settings)
    assert torch.equal(fast, slow)  # over seven overflows of every layer
    assert lengths == [9] + [1] * 29, "generation read the prefix again"


def test_generate_goes_on_from_a_cache(monkeypatch):
    model = make_model()
    prompt = torch.randint(50, (1, 20))
    whole = model.generate(prompt, max_new_tokens=12, do_sample=False)
    cache = model(prompt[:, :13]).cache
    lengths = counted(model, monkeypatch)
    again = model.generate(prompt, max_new_tokens=12, do_sample=False, cache=cache)
    assert torch.equal(again, whole)
    assert lengths[0] == 7


def test_beam_search_reorders_every_state():
    model = make_model()
    prompt = torch.randint(50, (2, 10))
    settings = {"max_new_tokens": 15, "num_beams": 3, "do_sample": False}
    fast = model.generate(prompt, **settings)
    assert torch.equal(fast, model.generate(prompt, **settings, use_cache=False))


def test_both_names_of_the_cache():
    model = make_model()
    ids = torch.randint(50, (1, 12))
    whole = model(ids).logits
    first = model(ids[:, :7]).cache
    assert torch.allclose(model(ids[:, 7:], past_key_values=first).logits, whole[:, 7:], atol=1e-5)
    with pytest.raises(ValueError, match="two names of one argument"):
        model(ids, cache=model.model.new_cache(), past_key_values=model.model.new_cache())
    with pytest.raises(ValueError, match="must be a MeanbankCache"):
        model(ids, cache=DynamicCache())
    with pytest.raises(ValueError, match="brings its own cache"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static")


def test_a_cache_of_another_shape_is_refused():
    model = make_model()
    ids = torch.randint(50, (2, 6))
    cache = model(ids).cache
    with pytest.raises(ValueError, match="holds 2 sequences, the input 1"):
        model(ids[:1], cache=cache)
    fewer = copy.deepcopy(model.config)
    fewer.num_hidden_layers, fewer.layers = 2, fewer.layers[:2]
    with pytest.raises(ValueError, match="a model with other layers"):
        model(ids, cache=MeanbankCache(fewer))
    for name, value in {"rope_theta": 77.0, "mlp_token_shift": False}.items():
        other = copy.deepcopy(model.config)
        assert getattr(other, name) != value
        setattr(other, name, value)
        with pytest.raises(ValueError, match="a model with other layers"):
            model(ids, cache=MeanbankCache(other))
    for call in (model, model.prefill):
        with pytest.raises(ValueError, match="must be a MeanbankCache, got DynamicCache"):
            call(ids, cache=DynamicCache())


@pytest.mark.parametrize("head_dim", [1, 3, 5, 7])
@pytest.mark.parametrize("backbone", ["gptalpha2", "nanochat"])
def test_odd_heads_have_a_channel_left_over(backbone, head_dim):
    plan = [{"memory": "full", "address": {"rotary_fraction": 1.0}}]
    model = make_model(backbone=backbone, head_dim=head_dim, plan=plan).eval()
    (geometry,) = {model.config.geometry(each) for each in model.config.plans()}
    assert geometry.rotary_dim == head_dim - 1
    ids = torch.randint(50, (1, 9))
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 11)


def test_an_interrupted_call_leaves_the_cache_as_it_was(monkeypatch):
    model = make_model()
    ids = torch.randint(50, (1, 20))
    expected = model(ids).logits[:, 12:]
    cache = model(ids[:, :12]).cache

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1], "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 12:], cache=cache)
    assert torch.allclose(model(ids[:, 12:], cache=cache).logits, expected, atol=1e-5)


def test_cache_operations():
    model = make_model()
    ids = torch.randint(50, (2, 21))
    cache = model(ids[:, :20]).cache
    assert cache.get_seq_length() == cache.seen == 20
    assert not cache.is_croppable
    cache.crop(0)
    with pytest.raises(ValueError, match="1 tokens cannot be forgotten, only 0"):
        cache.crop(-1)
    cache.batch_repeat_interleave(2)
    repeated = model(ids[:, 20:].repeat_interleave(2, dim=0), cache=cache).logits
    assert torch.equal(repeated[0], repeated[1])
    assert not torch.equal(repeated[0], repeated[2])
    cache.batch_select_indices(torch.tensor([2]))
    assert next(cache.layers[0].state.tensors()).shape[0] == 1
    assert cache.nbytes() > 0
    cache.reset()
    assert cache.nbytes() == cache.seen == 0


def test_training_without_a_cache_keeps_none():
    output = make_model()(torch.randint(50, (1, 9)), use_cache=False)
    assert output.cache is None


def test_labels_are_shifted_as_everywhere():
    model = make_model()
    ids = torch.randint(50, (2, 14))
    output = model(ids, labels=ids)
    logits = output.logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    assert torch.allclose(output.loss, expected)
    assert model(ids, logits_to_keep=2).logits.shape == (2, 2, 50)
    hidden = model(ids, output_hidden_states=True).hidden_states
    assert len(hidden) == 4


def test_embeddings_in_place_of_ids():
    model = make_model(plan=PLAN[:2])
    ids = torch.randint(50, (1, 18))
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embedded).logits, model(ids).logits)
    with pytest.raises(ValueError, match="bank of values"):
        make_model()(inputs_embeds=embedded)
    with pytest.raises(ValueError, match="exactly one of"):
        model()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.tensor([[1, 50]])}, "token id 50 is outside"),
        ({"input_ids": torch.tensor([[-1, 3]])}, "token id -1 is outside"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "at least one token"),
        ({"input_ids": torch.zeros(4, dtype=torch.long)}, "must be \\(batch, tokens\\)"),
        ({"input_ids": torch.zeros(1, 4)}, "must be integers"),
        (
            {"input_ids": torch.ones(1, 4).long(), "document_ids": torch.ones(1, 3)},
            "document_ids must",
        ),
        (
            {"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.ones(1, 3)},
            "attention_mask must",
        ),
        (
            {"input_ids": torch.ones(1, 2).long(), "position_ids": torch.tensor([[1, 2]])},
            "contradict",
        ),
        *(
            ({"input_ids": torch.ones(1, 2).long(), "position_ids": positions}, "contradict")
            for positions in (torch.tensor(0), torch.zeros(1, 0), torch.zeros(1, 1, 2))
        ),
        (
            {"input_ids": torch.ones(2, 3).long(), "position_ids": torch.arange(3).expand(3, 3)},
            "contradict",
        ),
        ({"input_ids": torch.ones(1, 2).long(), "output_attentions": True}, "not supported"),
        (
            {"input_ids": torch.ones(1, 2).long(), "token_type_ids": torch.ones(1, 2)},
            "does not take",
        ),
        ({"input_ids": torch.ones(1, 2).long(), "past_key_value": 3}, "does not take"),
    ],
)
def test_wrong_input_is_one_clear_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        make_model()(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.ones(1, 3).long(), "targets must have shape"),
        (torch.ones(1, 2), "targets must be integers"),
        (torch.ones(1, 2, dtype=torch.bool), "targets must be integers"),
        (torch.tensor([[1, 50]]), "target 50 is outside"),
        (torch.tensor([[-1, 3]]), "target -1 is outside"),
    ],
)
def test_wrong_targets_are_one_clear_line(targets, message):
    model = make_model()
    with pytest.raises(ValueError, match=message) as error:
        model(torch.ones(1, 2).long(), targets=targets)
    assert "\n" not in str(error.value)


def test_targets_of_any_integers():
    model, ids = make_model(), torch.randint(50, (2, 6))
    targets = torch.randint(50, (2, 6)).masked_fill(torch.rand(2, 6) < 0.3, -100)
    wanted = model(ids, targets=targets)
    found = model(ids.int(), targets=targets.int())
    assert torch.equal(found.losses, wanted.losses) and torch.equal(found.loss, wanted.loss)
    nothing = model(ids, targets=torch.full_like(ids, -100))
    assert nothing.loss == 0 and not nothing.losses.any()


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        (torch.zeros(1, 0, 32), "at least one token"),
        (torch.zeros(0, 2, 32), "at least one token"),
        (torch.zeros(1, 2, 31), r"must be \(batch, tokens, 32\)"),
        (torch.zeros(1, 32), r"must be \(batch, tokens, 32\)"),
        (torch.zeros(1, 2, 32).long(), "floating-point"),
    ],
)
def test_wrong_embeddings_are_one_clear_line(embeddings, message):
    model = make_model(plan=PLAN[:2])
    with pytest.raises(ValueError, match=message) as error:
        model(inputs_embeds=embeddings)
    assert "\n" not in str(error.value)


def test_any_watched_head_is_called():
    model, seen = make_model(), []
    ids = torch.randint(50, (1, 6))
    model.lm_head.register_full_backward_hook(lambda *_: seen.append("backward"))
    model(ids, targets=ids).loss.backward()
    model.lm_head.register_full_backward_pre_hook(lambda *_: seen.append("before"))
    model(ids, targets=ids).loss.backward()
    assert seen == ["backward", "before", "backward"]


MIXED = {"type": "mixed"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 30}, "not divisible by num_attention_heads"),
        ({"num_key_value_heads": 3}, "must be a multiple of"),
        ({"initialization": "papr"}, "choose one of paper"),
        ({"backbone": "gpt2"}, "choose one of gptalpha2"),
        ({"plan": [{"where": [0], "values": "first_layer"}]}, "only those of an earlier one"),
        (
            {"plan": [{"where": [1], "values": {"type": "first_layer", "layer": 2}}]},
            "layer 1 cannot take over the values of layer 2",
        ),
        (
            {
                "plan": [
                    {"values": {"type": "mixed", "other": {"type": "bank", "scale": "learned"}}}
                ]
            },
            "other.scale must be fixed",
        ),
        (
            {"plan": [{"values": {"type": "mixed", "other": "projection"}}]},
            "other must be one of bank",
        ),
        ({"plan": [{"memory": "rwkv7"}], "num_key_value_heads": 1}, "no grouped queries"),
        (
            {"plan": [{"memory": "rwkv7", "address": {"rotary_fraction": 0.5}}]},
            "a layer with rwkv7 has no address",
        ),
        ({"plan": [{"memory": {"type": "kmv"}}]}, "choose one of kvm"),
        ({"plan": [{"memory": {"type": "kvm", "chunk": 3}}]}, "unknown setting in plan.0.memory"),
        ({"plan": [{"memory": {"type": "kvm", "sink": 300}}]}, "sink must be"),
        (
            {"plan": [{"memory": {"type": "kvm", "budget": {"type": "fixed", "count": 0}}}]},
            "positive",
        ),
        ({"plan": [{"memory": {}}]}, "needs a `type`"),
        ({"plan": [{"values": {"type": "bnak"}}]}, "choose one of bank"),
        ({"plan": [{"where": "last_thrid"}]}, "choose one of last_third"),
        ({"plan": [{"where": [7]}]}, "there is no layer 7"),
        ({"plan": [{"address": {"rotary_fraction": 1.0}}]}, "zeroes the rotary channels"),
        ({"tie_word_embeddings": True}, "do not tie"),
        ({"plan": None, "layers": [{}, {}]}, "an entry for each of 3 layers"),
        ({"layers": [{}, {}, {}]}, "either plan or layers"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer"),
        ({"head_dim": 0}, "head_dim must be a positive integer"),
        ({"intermediate_size": -3}, "intermediate_size must be a positive integer"),
        ({"vocab_size": 2.5}, "vocab_size must be a positive integer"),
        ({"residual_scale": "x"}, "residual_scale must be a number"),
        ({"rope_theta": 0}, "rope_theta must be positive"),
        ({"mlp_token_shift": "yes"}, "mlp_token_shift must be true or false"),
        ({"plan": 3}, "plan"),
        ({"plan": [{"memory": {"type": "kvm", "backend": "fast"}}]}, "choose one of"),
    ],
)
def test_wrong_configurations_are_one_clear_line(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        make_model(**settings)
    assert "\n" not in str(error.value)


def test_banks_are_not_resized():
    with pytest.raises(ValueError, match="cannot be resized"):
        make_model().resize_token_embeddings(60)
    model = make_model(plan=PLAN[:2])
    model.resize_token_embeddings(60)
    assert model(torch.tensor([[59]])).logits.shape == (1, 1, 60)


def test_half_precision_runs():
    model = make_model().to(torch.bfloat16)
    ids = torch.randint(50, (1, 40))
    output = model(ids)
    assert output.logits.dtype == torch.bfloat16
    assert torch.isfinite(output.logits).all()
    rows = output.cache.layers[1].state.attention.memory.memory.rows
    assert rows.key.dtype == torch.float32
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 44)


def test_gradients_under_autocast():
    model = make_model().train()
    ids = torch.randint(50, (2, 40))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    exact = make_model().train()
    exact.load_state_dict(model.state_dict())
    full = exact(ids, labels=ids, use_cache=False).loss
    assert abs(loss.item() - full.item()) < 0.05 * full.item()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_layers_given_one_by_one_are_completed():
    layers = [{"memory": "full"}, {"values": "bank"}]
    config = MeanbankConfig(num_hidden_layers=2, layers=layers)
    assert [layer["memory"]["type"] for layer in config.layers] == ["full", "kvm"]
    assert [layer["values"]["type"] for layer in config.layers] == ["projection", "bank"]
    assert MeanbankConfig.from_dict(config.to_dict()).layers == config.layers
