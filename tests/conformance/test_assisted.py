"""`generate` with drafts of an assistant or from the prompt: the model's own greedy text."""

import pytest
import torch

from tests.conformance.models import MEMORIES, make_model

CHUNKED = {
    f"{name} in chunks of {size}": {**MEMORIES[name], "chunk_size": size}
    for name, sizes in {"kvm_fixed": (4, 7), "kvm_power_law": (2, 5), "ovq": (3,)}.items()
    for size in sizes
}
KINDS = {
    **{name: MEMORIES[name] for name in ("full", "sliding_window", "rwkv7", "kvm_three_chunks")},
    **CHUNKED,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_assisted_generation_is_greedy_generation(kind):
    """With a good assistant, a bad one and by looking the prompt up: the model's own text."""
    plan = [{"memory": KINDS[kind]}, {"where": [1], "values": "bank"}]
    model, good = (
        make_model("rwkv7", "bank", "heads", torch.float64, layers=2, plan=plan) for _ in range(2)
    )
    with torch.no_grad():
        for parameter in good.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    bad = make_model("sliding_window", "projection", "heads", torch.float64, layers=1)
    prompt = torch.randint(40, (1, 11))
    options = {"max_new_tokens": 18, "do_sample": False}
    wanted = model.generate(prompt, **options)
    for assistant, draft in ((good, 6), (bad, 3)):
        assistant.generation_config.num_assistant_tokens = draft
        assistant.generation_config.assistant_confidence_threshold = 0.0
        found = model.generate(prompt, assistant_model=assistant, **options)
        assert torch.equal(found, wanted)
    twice = torch.cat([wanted, wanted[:, :9]], dim=1)
    wanted = model.generate(twice, **options)
    found = model.generate(twice, prompt_lookup_num_tokens=5, **options)
    assert torch.equal(found, wanted)
