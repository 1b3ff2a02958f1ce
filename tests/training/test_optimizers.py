"""Several optimizers as one, in memory and through a checkpoint."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.training.checkpoint import load_checkpoint, save_checkpoint, snapshot
from meanbank.training.recipes import BoVRecipe, Optimizers

STEPS = 6


def make_model(backbone: str) -> MeanbankForCausalLM:
    kvm = {"type": "kvm", "chunk_size": 4, "budget": {"type": "power_law", "factor": 2}}
    config = MeanbankConfig(
        backbone=backbone,
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        plan=[{"memory": kvm}, {"where": "last_third", "values": "bank"}],
    )
    return MeanbankForCausalLM(config)


def train(model, optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        BoVRecipe().set_step(optimizer, step, STEPS)
        ids = torch.randint(40, (2, 25), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(ours: dict, theirs: dict) -> bool:
    """Whether two state dicts are equal to the last bit."""
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    return all(
        ours["state"][index].keys() == entries.keys()
        and all(torch.equal(ours["state"][index][key], entries[key]) for key in entries)
        for index, entries in theirs["state"].items()
    )


@pytest.mark.parametrize("backbone", ["gptalpha2", "nanochat"])
def test_muon_and_adamw_resume_bit_for_bit(tmp_path, backbone):
    model = make_model(backbone)
    optimizer = BoVRecipe().optimizer(model, STEPS)
    assert [type(part).__name__ for part in optimizer.parts] == ["Muon", "AdamW"]
    train(model, optimizer, 0, 3)
    taken = snapshot(model, optimizer, None, step=3, tokens=5)
    path = save_checkpoint(tmp_path, taken, keep_last=1)
    expected = train(model, optimizer, 3, STEPS)

    again = make_model(backbone)
    resumed = BoVRecipe().optimizer(again, STEPS)
    assert load_checkpoint(path, again, resumed) == {"step": 3, "tokens": 5}
    assert train(again, resumed, 3, STEPS) == expected
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other)
    assert same(resumed.state_dict(), optimizer.state_dict())


def test_parameters_are_numbered_through():
    first, second, third = (nn.Parameter(torch.ones(2, 2) * n) for n in (1, 2, 3))
    optimizer = Optimizers(
        [
            torch.optim.Muon([{"params": [first]}, {"params": [second]}]),
            torch.optim.AdamW([third]),
        ]
    )
    for parameter in (second, third):  # the first one has no gradient, and no state
        parameter.grad = torch.eye(2)
    optimizer.step()
    saved = optimizer.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1], [2]]
    assert {index: set(entries) for index, entries in saved["state"].items()} == {
        1: {"momentum_buffer"},
        2: {"step", "exp_avg", "exp_avg_sq"},
    }
    optimizer.param_groups[2]["lr"] = 0.5
    assert optimizer.parts[1].param_groups[0]["lr"] == 0.5
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in (first, second, third))


def test_one_optimizer_is_as_by_itself():
    parameter = nn.Parameter(torch.ones(3))
    alone = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    alone.step()
    assert same(Optimizers([alone]).state_dict(), alone.state_dict())


def test_the_state_of_other_optimizers_is_refused():
    parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    two = Optimizers([torch.optim.Muon(parameters[:1]), torch.optim.AdamW(parameters[1:])])
    one = Optimizers([torch.optim.AdamW(parameters)])
    with pytest.raises(ValueError, match="expected 2 groups, got 1"):
        two.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="expected 1 groups, got 2"):
        one.load_state_dict(two.state_dict())
