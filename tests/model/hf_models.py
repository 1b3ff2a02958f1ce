"""The systems of the Hugging Face tests, and what several of them do."""

import torch

from meanbank import MeanbankForCausalLM
from tests.conformance.models import make_model

SYSTEMS = {
    "kvm_bank": ("kvm_power_law", "bank", "gptalpha2"),
    "full": ("full", "projection", "gptalpha2"),
    "window_first_layer": ("sliding_window", "first_layer", "nanochat"),
    "ovq": ("ovq", "projection", "gptalpha2"),
    "rwkv7": ("rwkv7", "projection", "nanochat"),
}
WITH_BANK = ["kvm_bank"]
WITHOUT_BANK = [name for name in SYSTEMS if name not in WITH_BANK]
VOCABULARY = 40


def make_system(name: str, dtype: torch.dtype = torch.float32, **settings) -> MeanbankForCausalLM:
    memory, source, backbone = SYSTEMS[name]
    return make_model(memory, source, "grouped", dtype, layers=2, backbone=backbone, **settings)


def random_ids(batch: int, length: int) -> torch.Tensor:
    """Token ids other than 0, which stands for padding."""
    return torch.randint(1, VOCABULARY, (batch, length))


def left_padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts (T,) as one batch, and its attention mask."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
    return ids, mask


def gradients(model, ids, autocast: bool = False, **arguments) -> dict[str, torch.Tensor]:
    """Gradients of the language-model loss, by parameter."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(ids, labels=ids, **arguments).loss
    loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
