"""Sparse gradients of tables: those of the dense ones, and an optimizer that sees no other rows."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.model import set_table_gradients
from meanbank.model.roles import Role, members_of, pick
from meanbank.training import LazyAdamW, load_config, train
from meanbank.training import trainer as trainer_module
from meanbank.training.gradients import clip, numbers_of
from meanbank.training.recipes import BoVRecipe, KVMRecipe, PlainRecipe

SPARSE = "training.recipe.table_gradients=sparse"
VOCABULARY = 40
SOURCES = {
    "own": "bank",
    "shared": {"type": "bank", "table": "shared"},
    "mixed": {"type": "mixed", "other": "bank"},
    "mixed_shared": {"type": "mixed", "other": {"type": "bank", "table": "shared"}},
    "added": "gated_additive",
    "published": {"type": "first_layer", "layer": 0},  # whatever the first layer has
}


def model_of(*sources: str) -> MeanbankForCausalLM:
    """One layer for each; the same start values every time, none of which is zero."""
    torch.manual_seed(0)
    kvm = {"type": "kvm", "chunk_size": 4, "budget": {"type": "power_law", "factor": 2}}
    values = [{"where": [layer], "values": SOURCES[name]} for layer, name in enumerate(sources)]
    config = MeanbankConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=len(sources),
        num_attention_heads=2,
        plan=[{"memory": kvm}, *values],
    )
    model = MeanbankForCausalLM(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tables_of(model: nn.Module) -> list[nn.Parameter]:
    return [member.parameter for member in pick(members_of(model), Role.TABLE)]


def random_ids(seed: int, length: int = 11) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, ids: torch.Tensor) -> None:
    logits = model(input_ids=ids, use_cache=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()


def assert_same_gradients(dense: nn.Module, sparse: nn.Module) -> None:
    for (name, one), other in zip(dense.named_parameters(), sparse.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert (one.grad - other.grad.to_dense()).abs().max() <= 1e-12, name
    assert all(table.grad.is_sparse for table in tables_of(sparse))


def both(*sources: str) -> tuple[MeanbankForCausalLM, MeanbankForCausalLM]:
    """The same model twice, with dense and with sparse gradients."""
    dense, sparse = model_of(*sources), model_of(*sources)
    set_table_gradients(sparse, "sparse")
    return dense, sparse


ids_of_batches = st.lists(
    st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=9, max_size=9), min_size=1),
    min_size=1,
    max_size=3,
).map(lambda batches: [torch.tensor(rows[:2]) for rows in batches])
layers = st.tuples(
    st.sampled_from([name for name in SOURCES if name != "published"]),
    *[st.sampled_from(list(SOURCES))] * 2,
)


@settings(max_examples=12, deadline=None)
@given(sources=layers, batches=ids_of_batches, together=st.integers(1, 2))
def test_sgd_does_the_same(sources, batches, together):
    """Any ids, tables of a layer's own or shared, batches added up before a step or not."""
    models = both(*sources)
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for number, ids in enumerate(batches, start=1):
            backward(model, ids)
            if number % together == 0:
                optimizer.step()
                optimizer.zero_grad()
    dense, sparse = models
    for (name, one), other in zip(dense.named_parameters(), sparse.parameters(), strict=True):
        assert (one - other).abs().max() <= 1e-12, name


def test_only_tables_are_sparse_and_only_rows_at_hand():
    _, model = both("own", "shared", "mixed_shared", "added", "published")
    ids = random_ids(0)
    backward(model, ids)
    sparse = [p for p in model.parameters() if p.grad is not None and p.grad.is_sparse]
    assert {id(p) for p in sparse} == {id(p) for p in tables_of(model)}
    assert len(sparse) == 3  # own, shared, added
    for table in sparse:
        assert set(table.grad.coalesce().indices()[0].tolist()) == set(ids.flatten().tolist())
    model.zero_grad()
    set_table_gradients(model, "dense")
    backward(model, ids)
    assert not any(table.grad.is_sparse for table in tables_of(model))


@pytest.mark.parametrize("how", ["checkpointing", pytest.param("compiled", marks=pytest.mark.slow)])
def test_gradients_of_models_that_recompute_or_are_compiled(how):
    dense, sparse = both("own", "shared", "mixed_shared", "added", "published")
    ids = random_ids(0)
    backward(dense, ids)
    if how == "checkpointing":
        sparse.activation_checkpointing_enable()
        backward(sparse, ids)
    else:
        torch.compiler.reset()
        backward(torch.compile(sparse, backend="eager"), ids)
    assert_same_gradients(dense, sparse)


def test_norm_and_clipping_are_the_dense_ones():
    models = both("own", "shared", "mixed_shared", "added")
    norms = []
    for model in models:
        for seed in range(3):  # gradients add up
            backward(model, random_ids(seed))
        numbers = numbers_of(model)
        norms.append(torch.nn.utils.get_total_norm(numbers.values()))
        clip(numbers.values(), 1e-3, norms[-1])
    assert abs(norms[0] - norms[1]) <= 1e-12 * norms[0]
    assert_same_gradients(*models)
    assert all(table.grad.is_coalesced() for table in tables_of(models[1]))
    left = torch.nn.utils.get_total_norm(numbers_of(models[1]).values())
    assert left == pytest.approx(1e-3, rel=1e-2)


def test_clipping_is_that_of_torch():
    ours, theirs = model_of("own"), model_of("own")
    for model in (ours, theirs):
        backward(model, random_ids(0))
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
    numbers = numbers_of(ours)
    norm = torch.nn.utils.get_total_norm(numbers.values())
    clip(numbers.values(), 0.01, norm)
    assert norm == expected
    gradients = numbers_of(theirs)
    assert gradients.keys() == numbers.keys()
    assert all(torch.equal(gradients[name], numbers[name]) for name in numbers)


SETTINGS = {"lr": 0.1, "betas": (0.8, 0.995), "eps": 1e-10, "weight_decay": 0.3}


def test_the_first_step_of_rows_looked_up_is_adamws():
    dense, sparse = both("own", "shared", "mixed_shared", "added")
    ids = random_ids(0)
    before = [table.detach().clone() for table in tables_of(sparse)]
    optimizers = [
        kind(tables_of(model), **SETTINGS)
        for kind, model in ((torch.optim.AdamW, dense), (LazyAdamW, sparse))
    ]
    for model, optimizer in zip((dense, sparse), optimizers, strict=True):
        backward(model, ids)
        optimizer.step()
    rows = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, ids.flatten(), True)
    assert 0 < rows.sum() < VOCABULARY
    for one, other, start in zip(tables_of(dense), tables_of(sparse), before, strict=True):
        assert (one - other)[rows].abs().max() <= 1e-12
        assert torch.equal(other[~rows], start[~rows])
        ours, theirs = optimizers[1].state[other], optimizers[0].state[one]
        assert ours.keys() == theirs.keys()
        assert ours["step"] == theirs["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            assert (ours[key] - theirs[key]).abs().max() <= 1e-12
            assert not ours[key][~rows].any()


def test_later_steps_are_adamw_row_by_row():
    """With its own rows alone in the table, dense AdamW does the same; others wait."""
    table = nn.Parameter(torch.randn(5, 3, dtype=torch.double))
    alone = nn.Parameter(table[1:3].detach().clone())
    lazy, dense = LazyAdamW([table], **SETTINGS), torch.optim.AdamW([alone], **SETTINGS)
    for step in range(4):
        ids = torch.tensor([1, 2, 2])
        torch.manual_seed(step)
        weights = torch.randn(3, 3, dtype=torch.double)
        (F.embedding(ids, table, sparse=True) * weights).sum().backward()
        (F.embedding(ids - 1, alone) * weights).sum().backward()
        for optimizer in (lazy, dense):
            optimizer.step()
            optimizer.zero_grad()
        assert (table[1:3] - alone).abs().max() <= 1e-12
    waiting = table.detach().clone()
    moments = lazy.state[table]["exp_avg"].clone()
    F.embedding(torch.tensor([4]), table, sparse=True).sum().backward()
    lazy.step()
    assert lazy.state[table]["step"] == 5
    assert torch.equal(table[:4], waiting[:4])  # no old momentum, no decay
    assert torch.equal(lazy.state[table]["exp_avg"][:4], moments[:4])


def test_nothing_looked_up_changes_nothing():
    table = nn.Parameter(torch.randn(5, 3))
    before = table.detach().clone()
    F.embedding(torch.empty(0, dtype=torch.long), table, sparse=True).sum().backward()
    LazyAdamW([table], **SETTINGS).step()
    assert torch.equal(table, before)


def test_a_dense_gradient_is_refused():
    model = model_of("own")
    optimizer = BoVRecipe(table_gradients="sparse").optimizer(model, 10)
    set_table_gradients(model, "dense")
    backward(model, random_ids(0))
    with pytest.raises(ValueError, match=r"table \(40, 16\) is dense; look it up") as error:
        optimizer.step()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("recipe", [BoVRecipe, KVMRecipe, PlainRecipe])
def test_recipes_move_the_group_of_tables_and_nothing_else(recipe):
    model = model_of("own", "shared", "mixed")
    dense = recipe().optimizer(model, 10)
    sparse = recipe(table_gradients="sparse").optimizer(model, 10)
    groups = [
        {group["name"]: {**group, "params": len(group["params"])} for group in each.param_groups}
        for each in (dense, sparse)
    ]
    assert groups[0] == groups[1]
    assert [type(part) for part in sparse.parts] == [*(type(p) for p in dense.parts), LazyAdamW]
    assert [id(p) for p in sparse.parts[-1].param_groups[0]["params"]] == [
        id(p) for p in tables_of(model)
    ]
    recipe(table_gradients="sparse").set_step(sparse, 5, 10, 0)
    rates = [group["lr"] / group["peak_lr"] for group in sparse.param_groups]
    assert rates == pytest.approx([rates[0]] * len(rates))
    backward(model, random_ids(0))
    assert all(table.grad.is_sparse for table in tables_of(model))
    model.zero_grad()
    recipe().optimizer(model, 10)
    backward(model, random_ids(0))
    assert not any(table.grad.is_sparse for table in tables_of(model))


def test_a_model_without_tables_has_no_use_for_it():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = MeanbankForCausalLM(MeanbankConfig(vocab_size=9, **sizes))
    optimizer = KVMRecipe(table_gradients="sparse").optimizer(model, 9)
    assert [type(part) for part in optimizer.parts] == [torch.optim.AdamW]


def test_an_unknown_setting_is_one_line(config_file):
    with pytest.raises(ValueError, match="table_gradients 'rowwise'; choose") as error:
        load_config(config_file, ["training.recipe.table_gradients=rowwise"])
    assert "\n" not in str(error.value)


def test_a_gradient_that_is_not_finite_stops_too(config_file, tmp_path, monkeypatch):
    loss_of = trainer_module.language_loss

    def infinite_slope(model, batch, targets, positions=None):
        (table,) = tables_of(model)
        row = F.embedding(batch.input_ids[:1, 0], table, sparse=True)
        return loss_of(model, batch, targets) + (row - row.detach()).abs().sum().sqrt()

    monkeypatch.setattr(trainer_module, "language_loss", infinite_slope)
    with pytest.raises(trainer_module.NonFiniteError, match=r"at step 1, first in .*\.table"):
        train(load_config(config_file, [SPARSE]), tmp_path / "run")
