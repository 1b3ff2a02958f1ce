"""A row's result does not depend on its neighbours, to the bit where that is asked for."""

import pytest
import torch

import meanbank
from meanbank import MeanbankConfig, MeanbankForCausalLM
from tests.conformance.models import MEMORIES, SOURCES
from tests.model.hf_models import SYSTEMS, left_padded, make_system, random_ids

BATCH = 16
every_system = pytest.mark.parametrize("system", SYSTEMS)


def make_wide(system: str) -> MeanbankForCausalLM:
    """Wide enough for products to be summed differently at another batch size."""
    memory, source, backbone = SYSTEMS[system]
    config = MeanbankConfig(
        vocab_size=40,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        backbone=backbone,
        residual_scale=1.0,
        plan=[{"memory": MEMORIES[memory]}, {"where": [1], "values": SOURCES[source]}],
    )
    model = MeanbankForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@every_system
def test_the_same_text_and_nearly_the_same_logits(system):
    model, ids = make_wide(system), random_ids(BATCH, 18)
    options = {"max_new_tokens": 10, "do_sample": False}
    with torch.inference_mode():
        together, texts = model(ids).logits, model.generate(ids, **options)
        for row in range(BATCH):
            alone = model(ids[row : row + 1]).logits[0]
            assert (alone - together[row]).abs().max() <= 1e-5
            assert torch.equal(model.generate(ids[row : row + 1], **options)[0], texts[row])


@every_system
def test_the_same_bits(system):
    model, ids = make_wide(system), random_ids(BATCH, 18)
    with torch.inference_mode(), meanbank.batch_invariant():
        output = model(ids[:, :11], output_hidden_states=True)
        more = [model(ids[:, at : at + 1], cache=output.cache).logits for at in range(11, 18)]
        together = torch.cat([output.logits, *more], dim=1)
        assert output.cache.lengths == (18,) * BATCH
        for row in range(BATCH):
            mine = ids[row : row + 1]
            first = model(mine[:, :11], output_hidden_states=True)
            more = [model(mine[:, at : at + 1], cache=first.cache).logits for at in range(11, 18)]
            assert torch.equal(torch.cat([first.logits, *more], dim=1)[0], together[row])
            assert torch.equal(first.hidden_states[1][0], output.hidden_states[1][row])
    assert torch.allclose(model(ids).logits, together, atol=1e-5)


@every_system
def test_the_same_bits_whatever_the_padding(system):
    model = make_wide(system)
    prompts = [random_ids(1, length)[0] for length in (9, 1, 12, 12, 5)]
    ids, mask = left_padded(prompts)
    options = {
        "max_new_tokens": 9,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    with torch.inference_mode(), meanbank.batch_invariant():
        together = model.generate(ids, attention_mask=mask, **options)
        for row, prompt in enumerate(prompts):
            alone = model.generate(prompt[None], **options)
            for ours, theirs in zip(alone.logits, together.logits, strict=True):
                assert torch.equal(ours[0], theirs[row])
        # the cache that is left goes on outside as any other
        cache, width = together.cache, ids.shape[1] + 8
        assert cache.seen == width
        assert cache.lengths == tuple(len(prompt) + 8 for prompt in prompts)
    with torch.inference_mode():
        logits = model(together.sequences[:, -1:], cache=cache).logits
        for row, prompt in enumerate(prompts):
            text = torch.cat([prompt, together.sequences[row, ids.shape[1] :]])
            assert torch.allclose(model(text[None]).logits[0, -1], logits[row, 0], atol=1e-5)


def test_what_goes_in_and_comes_out_is_the_same():
    model, ids = make_system("kvm_bank"), random_ids(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2] = 0, 0  # the last row reads nothing
    expected = model(ids, mask, labels=ids)
    with meanbank.batch_invariant(), meanbank.batch_invariant():
        found = model(ids, mask, labels=ids)
        state, cache = model.model(ids, mask, return_dict=False)
        assert torch.allclose(model.lm_head(state), found.logits)
        assert model(ids, use_cache=False).cache is None
        with pytest.raises(ValueError, match="holds 3 sequences, the input 2"):
            model(ids[:2], cache=cache)
        with pytest.raises(ValueError, match="contradict"):
            model(ids, position_ids=torch.ones_like(ids))
        found.loss.backward()
        cache.batch_select_indices(torch.tensor([2, 0]))
        assert model(ids[:2], cache=cache).cache.lengths == (9, 14)
    assert torch.allclose(found.loss, expected.loss)
    assert torch.allclose(found.logits, expected.logits, atol=1e-5)
    assert found.cache.lengths == expected.cache.lengths == (5, 9, 0)
