"""Arms compute the same thing, and their limits are what PyTorch counts. No clocks here."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meanbank.benchmarks import Machine, Sizes
from meanbank.benchmarks.bank import BankBenchmark, zipf
from meanbank.benchmarks.decode import Decoder, decode_arm, decoder_of, offsets, order
from meanbank.benchmarks.full_attention import full, full_backward, full_forward
from meanbank.benchmarks.full_decode import KEYS, VALUES, FullCache, fastest_layouts
from meanbank.benchmarks.kvm import attend, backward_arm
from meanbank.benchmarks.limits import rows_read, work
from meanbank.benchmarks.model import ModelBenchmark, ModelSizes
from meanbank.benchmarks.operands import Operands, kvm
from meanbank.benchmarks.peak import peak_bytes
from meanbank.memory.kvm import KeyValueMeans
from tests.counting import flop_counter

SIZES = Sizes(batch=2, heads=3, head_dim=8, chunk_size=8, layers=3)
MIB = 2**20


def operands(length: int, dtype: torch.dtype = torch.float64) -> Operands:
    return Operands.random(SIZES, length, dtype, "cpu")


@pytest.mark.parametrize(("length", "block"), [(1, 4), (4, 4), (21, 4), (21, 64)])
def test_full_attention_equals_sdpa(length, block):
    query, key, value = (x.flatten(0, 1) for x in operands(length).tensors()[:3])
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(full_forward(query, key, value, block), expected)


@pytest.mark.parametrize("block", [4, 64])
def test_gradients_of_full_attention_equal_those_of_sdpa(block):
    leaves = [x.flatten(0, 1).requires_grad_() for x in operands(21).tensors()[:3]]
    output = F.scaled_dot_product_attention(*leaves, is_causal=True)
    gradient = torch.randn_like(output)
    expected = torch.autograd.grad(output, leaves, gradient)
    plain = [x.detach() for x in leaves]
    found = full_backward(*plain, output.detach(), gradient, block)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    shaped = [x.view(2, 3, 21, 8) for x in leaves]
    found = torch.autograd.grad(full(*shaped), leaves, gradient.view(2, 3, 21, 8))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("values", VALUES)
def test_every_layout_decodes_what_sdpa_does(keys, values, dtype):
    query, key, value = torch.randn(3, 5, 700, 8).to(dtype).unbind()
    cache = FullCache(key[:, :500], value[:, :500], 700, (keys, values))
    tolerance = {"rtol": 1.6e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    for at in range(500, 700):
        found = cache.step(query[:, at], key[:, at], value[:, at], at)
        if at in (500, 511, 512, 513, 639, 640, 699):
            shown = slice(0, at + 1)
            expected = F.scaled_dot_product_attention(
                query[:, at : at + 1], key[:, shown], value[:, shown]
            )[:, 0]
            torch.testing.assert_close(found, expected, **tolerance)


def test_layouts_are_chosen_among_all():
    key, value = torch.randn(2, 4, 64, 8).unbind()
    chosen = fastest_layouts(key, value)
    assert chosen[0] in KEYS
    assert chosen[1] in VALUES


@pytest.mark.parametrize("budget", ["fixed", "sqrt", "saturating"])
def test_ours_equals_the_reference(budget):
    data = operands(50)
    expected = attend(data, SIZES, "reference", budget)
    torch.testing.assert_close(attend(data, SIZES, "ours", budget), expected)
    gradients = []
    for arm in ("ours", "reference"):
        timed = backward_arm(data, SIZES, arm, budget)
        gradients.append(timed.run(timed.prepare()))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("arm", ["sdpa", "full"])
def test_kvm_is_full_attention_within_its_window(arm):
    data = operands(16)
    torch.testing.assert_close(attend(data, SIZES, arm, None), attend(data, SIZES, "ours", "fixed"))


@pytest.mark.parametrize(("chunk", "layers"), [(8, 3), (8, 8), (8, 1), (8, 11), (256, 24)])
def test_decoding_meets_every_place_of_a_chunk_once(chunk, layers):
    steps = order(chunk, layers)
    assert sorted(token for _, token in steps) == list(range(chunk))
    starts = offsets(chunk, layers)
    for layer in range(layers):
        own = [token for at, token in steps if at == layer]
        assert own == list(range(starts[layer], starts[layer] + len(own)))
    turns = [layer for layer, _ in steps]
    assert turns[: min(layers, chunk)] == sorted(turns[: min(layers, chunk)])


@pytest.mark.parametrize(
    ("arm", "budget"), [("sdpa", None), ("full", None), ("ours", "sqrt"), ("reference", "fixed")]
)
@torch.inference_mode()
def test_decoders_go_on_as_one_pass_does(arm, budget):
    context, data = 20, operands(20 + 9, torch.float32)
    whole = attend(data, SIZES, arm, budget)
    decoder = decoder_of(data, context, SIZES, Machine(), arm, budget)
    for _ in range(2):  # a round starts afresh
        states = decoder.start()
        for layer, offset in enumerate(offsets(8, 3)):
            output, _ = decoder.step(states[layer], layer, offset)
            at = context + offset
            torch.testing.assert_close(output, whole[:, :, at : at + 1], atol=1e-5, rtol=1e-4)
        timed = decode_arm(decoder, SIZES)
        timed.run(timed.prepare())
    assert timed.steps == 8


@pytest.mark.parametrize("budget", [None, "fixed", "sqrt"])
@pytest.mark.parametrize("length", [5, 16, 17, 40])
def test_bytes_are_what_states_hold(budget, length):
    """In fp32, where rows and window have one size: each is read once by the last token."""
    data = operands(length + 1, torch.float32)
    row = 2 * 3 * 8 * 4 * 2  # a key and a value, heads, channels, bytes, batch
    if budget is None:
        memory = None
        held = decoder_of(data, length, SIZES, Machine(), "sdpa", None).nbytes
    else:
        memory = SIZES.memory(budget).build(SIZES.geometry)
        _, state = kvm(data.part(0, length), SIZES, budget, "reference")
        parts = [state.window_key, state.window_value]
        if state.rows is not None:
            parts += [state.rows.key, state.rows.value]
        held = sum(part.numel() * part.element_size() for part in parts)
    assert rows_read(memory, length) * row == held


@pytest.mark.parametrize("budget", [None, "fixed", "sqrt"])
def test_flops_are_what_pytorch_counts(budget):
    """Token by token nothing is masked: the counter sees the pairs that the limit counts."""
    length, data = 40, operands(40 + 8, torch.float32)

    def count(start: int, stop: int) -> int:
        memory, total = None, 0
        for at in range(stop):
            with FlopCounterMode(display=False) as counter:
                if budget is None:
                    shown = data.part(0, at + 1)
                    scores = shown.query[:, :, -1:] @ shown.key.mT
                    _ = scores.softmax(-1) @ shown.value
                else:
                    token = data.part(at, at + 1)
                    _, memory = kvm(token, SIZES, budget, "reference", memory)
            total += counter.get_total_flops() if at >= start else 0
        return total

    prefill = work("prefill", SIZES, budget, length, torch.float32)
    assert prefill.flops == count(0, length)
    decode = work("decode", SIZES, budget, length, torch.float32)
    assert decode.flops * 8 == count(length, length + 8)
    backward = work("backward", SIZES, budget, length, torch.float32)
    if budget is None:
        assert backward.flops == 2 * prefill.flops
    else:  # similarities have no gradient
        assert prefill.flops < backward.flops < 2 * prefill.flops


def test_blocks_of_one_query_do_just_the_counted_flops():
    query, key, value = (x.flatten(0, 1) for x in operands(13).tensors()[:3])
    limit = work("prefill", SIZES, None, 13, torch.float32).flops
    with FlopCounterMode(display=False) as counter:
        full_forward(query, key, value, block=1)
    assert counter.get_total_flops() == limit
    with FlopCounterMode(display=False) as counter:
        full_backward(query, key, value, value, value, block=1)
    again = limit // 2  # the scores
    assert counter.get_total_flops() == work("backward", SIZES, None, 13, torch.float32).flops + (
        again
    )


def test_peak_bytes_of_known_allocations():
    def allocate() -> torch.Tensor:
        first = torch.ones(2 * MIB // 4)
        second = torch.ones(3 * MIB // 4)
        del first
        third = torch.ones(MIB // 4)
        del second
        return third

    assert abs(peak_bytes(allocate, Machine()) - 5 * MIB) < 4096
    kept = torch.ones(MIB)  # is there before
    assert peak_bytes(lambda: kept.view(-1), Machine()) < 4096
    # What kernels allocate inside counts: the transposed copy that a softmax over rows makes.
    assert peak_bytes(lambda: kept.view(2, -1).t().softmax(-1), Machine()) >= 4 * MIB


def test_training_peak_counts_gradients():
    data = operands(64, torch.float32)
    timed = backward_arm(data, SIZES, "full", None)
    tensor = data.query.numel() * 4
    peak = peak_bytes(lambda: timed.run(timed.prepare()), Machine())
    assert 4 * tensor <= peak <= 10 * tensor  # the output, three gradients and a block of scores


@torch.inference_mode()
def test_bank_layers_agree_and_store_ids():
    sizes = Sizes(batch=2, heads=2, head_dim=8, chunk_size=8, layers=2)
    bench = BankBenchmark(sizes=sizes, vocabulary=50)
    for memory in ("full", "sqrt"):
        made = bench.decoders("float32", memory, 20)
        outputs = {}
        for name, decoder in made.items():
            states = decoder.start()
            outputs[name], state = decoder.step(states[1], 1, offsets(8, 2)[1])
            assert state.nbytes() > 0
        torch.testing.assert_close(outputs["bank"], outputs["cached"])
        assert outputs["projected"].shape == outputs["bank"].shape
        window = 20 if memory == "full" else 12  # tokens in the state
        saved = 2 * window * (2 * 8 * 4 - 4)
        assert made["cached"].nbytes - made["bank"].nbytes == saved
        assert made["bank"].work().flops == made["cached"].work().flops
        assert isinstance(made["bank"], Decoder)


def test_token_ids_follow_zipf():
    ids = zipf(100, 5000)
    assert ids.shape == (5000,)
    assert 0 <= int(ids.min()) <= int(ids.max()) < 100
    assert ids.bincount(minlength=100).max() > 5000 / 10


def test_model_work_and_arms():
    sizes = ModelSizes(vocabulary=32, hidden_size=16, layers=3, heads=2, chunk_size=4)
    bench = ModelBenchmark(sizes=sizes, arms=("full", "sqrt+bank"))
    ids = torch.randint(32, (1, 20 + 5))
    for name in bench.arms:
        model = bench.model(name, torch.float32).eval()
        for module in model.modules():
            if isinstance(module, KeyValueMeans):  # others may read spare slots along
                module.config = dataclasses.replace(module.config, backend="reference")
        cache = model.prefill(ids[:, :20]).cache
        held = cache.nbytes()
        # The fused kernel is not counted.
        math = sdpa_kernel(SDPBackend.MATH)
        with torch.no_grad(), math, flop_counter() as counter:
            for token in ids[:, 20:24].split(1, dim=1):
                model(token, cache=cache)
        limit = bench.work(model, "decode", 20, held)
        assert limit.flops * 4 == counter.get_total_flops()
        assert limit.nbytes > held
        for phase in ("training", "prefill", "decode"):
            timed, _ = bench.arm(model, phase, ids, 20)
            timed.run(timed.prepare())
