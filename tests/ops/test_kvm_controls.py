"""Controls and ablations of the KVM operator against a loop over single tokens and heads."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from meanbank.ops import kvm_attention
from meanbank.ops.kvm.options import KVMOptions
from meanbank.ops.kvm.routing import random_draws, selection, splitmix64
from tests.ops.test_kvm import each_backend, inputs

SEQUENCES = ("query", "key", "value", "merge_gate")
TEMPERATURES = ("state_temperature", "window_temperature")
SETTINGS = {
    "rotary_dim": 2,
    "chunk_size": 3,
    "window_chunks": 1,
    "sink": 1,
    "budget": lambda seen: int(2 * seen**0.5),
}
DEFAULTS = {"append": "novelty", "read_key": "normalized", "stored_rotary": "zeroed"}
CONTROLS = {
    "append_random": {"append": "random"},
    "append_recent": {"append": "recent"},
    "append_gate": {"append": "gate"},
    "read_raw": {"read_key": "raw"},
    "zeroed_again": {"stored_rotary": "zeroed_again"},
    "kept": {"stored_rotary": "kept"},
    "kept_full_rotary": {"stored_rotary": "kept", "rotary_dim": 6},
    "no_rotary": {"rotary_dim": 0},
    "all_three": {"append": "random", "read_key": "raw", "stored_rotary": "zeroed_again"},
}
ABLATIONS = {
    "defaults": {},
    "count": {"value_scale": "count"},
    "chunk_count": {"value_scale": "chunk_count"},
    "gated_initial": {"gated_writes": ("initial", "merge")},
    "gated_initial_values": {"gated_writes": ("initial", "merge"), "gated_parts": ("value",)},
    "gated_append": {"gated_writes": ("append", "merge")},
    "ungated": {"gated_writes": ()},
    "key_gate": {"gated_parts": ("key",)},
    "value_gate": {"gated_parts": ("value",)},
    "no_temperatures": {"without": TEMPERATURES},
    "no_gate": {"without": ("merge_gate",)},
    "no_sink": {"sink": 0},
}
VARIANTS = {**CONTROLS, **ABLATIONS}


def case(name, length, **sizes):
    """Tensors and settings of a variant."""
    settings = {**SETTINGS, **VARIANTS[name]}
    arguments = inputs(length, **sizes)
    for absent in settings.pop("without", ()):
        del arguments[absent]
    return arguments, settings


# ------------------------------------------------------------- the operator, one token at a time


class Oracle:
    """One head of keys and values, in NumPy; written from the paper and from the docstrings."""

    def __init__(self, key, value, gate, weight, bias, head, settings):
        self.key, self.value, self.gate = key, value, gate
        self.weight, self.bias, self.head = weight, bias, head
        self.settings = KVMOptions(**settings)
        self.rows: list[dict] = []
        self.updates: list[tuple[list, list]] = []
        self.margin = np.inf  # the smallest difference that decided anything

    def norm(self, x):
        x = x - x.mean()
        return x / np.sqrt((x**2).mean() + 1e-5) * self.weight + self.bias

    def stored(self, key):
        rotary = slice(0, self.settings.rotary_dim)
        kind, key = self.settings.stored_rotary, key.copy()
        if kind != "kept":
            key[rotary] = 0
        key = self.norm(key)
        if kind == "zeroed_again":
            key[rotary] = 0
        return key

    def factor(self, token, write, part):
        chosen = write == "initial" or part in self.settings.gated_parts
        chosen = chosen and write in self.settings.gated_writes
        return self.gate[token] if chosen and self.gate is not None else 1.0

    def open_row(self, token, write):
        value = self.value[token] * self.factor(token, write, "value")
        key = self.stored(self.key[token]) * self.factor(token, write, "key")
        radius = np.linalg.norm(self.value[token] if write == "initial" else value)
        self.rows.append({"key": key, "value": value, "radius": radius, "writes": 1, "age": 1})

    def likeness(self, token):
        return [self.stored(self.key[token]) @ self.norm(row["key"]) for row in self.rows]

    def appended(self, tokens, count):
        """The tokens with the `count` lowest of some number each."""
        gate = np.zeros(len(self.key)) if self.gate is None else self.gate
        ranks = {
            "novelty": lambda token: max(self.likeness(token)),
            "random": lambda token: signed(
                mixed(mixed(0, self.head), token)  # exact integers: no margin to watch
            ),
            "recent": lambda token: -token,
            "gate": lambda token: -gate[token],
        }
        rank = {token: ranks[self.settings.append](token) for token in tokens}
        ordered = sorted(tokens, key=lambda token: rank[token])
        if 0 < count < len(tokens):
            self.margin = min(self.margin, rank[ordered[count]] - rank[ordered[count - 1]])
        return sorted(ordered[:count])

    def overflow(self, start, seen):
        tokens = range(start, start + self.settings.chunk_size)
        if not self.rows:
            for token in tokens:
                self.open_row(token, "initial")
            return
        wanted = min(self.settings.budget(seen), tokens.stop) - len(self.rows)
        appended = self.appended(tokens, min(max(wanted, 0), len(tokens)))
        for token in appended:
            self.open_row(token, "append")
        routes, merged = {}, set(tokens) - set(appended)
        for row in self.rows:
            row["age"] += bool(merged)
        for token in merged:
            likeness = self.likeness(token)[self.settings.sink :]
            routes[token] = self.settings.sink + int(np.argmax(likeness))
            best = sorted(likeness)[-2:]
            self.margin = min(self.margin, best[-1] - best[0] if len(best) == 2 else np.inf)
        for token, route in routes.items():  # all are decided before any is written
            row = self.rows[route]
            row["key"] = row["key"] + self.stored(self.key[token]) * self.factor(
                token, "merge", "key"
            )
            row["value"] = row["value"] + self.value[token] * self.factor(token, "merge", "value")
            row["writes"] += 1
        self.updates.append(
            ([token - start for token in appended], [routes.get(token, -1) for token in tokens])
        )

    def readout(self, row):
        if self.settings.value_scale == "radius":
            return row["value"] * row["radius"] / np.linalg.norm(row["value"])
        return row["value"] / row["writes" if self.settings.value_scale == "count" else "age"]

    def read(self, token, query, far, near):
        """What one query (Dk,) at that position gets, with its two temperatures."""
        chunk = self.settings.chunk_size
        start = max(0, (token // chunk - self.settings.window_chunks + 1) * chunk)
        keys = [near * self.key[other] for other in range(start, token + 1)]
        values = [self.value[other] for other in range(start, token + 1)]
        for row in self.rows:
            raw = self.settings.read_key == "raw"
            keys.append(far * (row["key"] if raw else self.norm(row["key"])))
            values.append(self.readout(row))
        scores = np.stack(keys) @ query / np.sqrt(len(query))
        weights = np.exp(scores - scores.max())
        return weights @ np.stack(values) / weights.sum()


def mixed(seed, counter):
    """Output `counter` of SplitMix64, in Python's integers."""
    x = (seed + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def signed(x):
    return x - 2**64 if x >= 2**63 else x


def oracle(arguments, settings):
    """Outputs, for each batch row and key head its updates, and the smallest margin."""
    given = {name: tensor.detach().numpy() for name, tensor in arguments.items()}
    batch, heads, length, _ = given["query"].shape
    kv_heads, chunk = given["key"].shape[1], settings["chunk_size"]
    near, far = (given.get(name, np.ones(heads)) for name in reversed(TEMPERATURES))
    output = np.zeros((batch, heads, length, given["value"].shape[-1]))
    updates, margin = {}, np.inf
    for row, head in np.ndindex(batch, kv_heads):
        gate = given["merge_gate"][row, head] if "merge_gate" in given else None
        parts = (given["key"][row, head], given["value"][row, head], gate)
        memory = Oracle(*parts, given["norm_weight"], given["norm_bias"], head, settings)
        for token in range(length):
            start = token - settings["window_chunks"] * chunk
            if token % chunk == 0 and start >= 0:
                memory.overflow(start, token)
            group = heads // kv_heads
            for h in range(head * group, (head + 1) * group):
                output[row, h, token] = memory.read(
                    token, given["query"][row, h, token], far[h], near[h]
                )
        updates[row, head] = memory.updates
        margin = min(margin, memory.margin)
    return torch.from_numpy(output), updates, margin


# ------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize(
    ("shape", "heads"), [((3, 1), (4, 2)), ((4, 2), (3, 1)), ((2, 3), (2, 2)), ((3, 2), (4, 2))]
)
@pytest.mark.parametrize("name", VARIANTS)
@each_backend
def test_a_loop_over_tokens_gives_the_same(backend, name, shape, heads):
    chunk_size, window_chunks = shape
    sizes = {"batch": 2, "heads": heads[0], "kv_heads": heads[1]}
    arguments, settings = case(name, 23, **sizes)
    settings |= {"chunk_size": chunk_size, "window_chunks": window_chunks}
    trace: list = []
    output = kvm_attention(**arguments, **settings, trace=trace, backend=backend)
    expected, updates, margin = oracle(arguments, settings)
    assert margin > 1e-10
    for (row, head), theirs in updates.items():
        ours = [(u.appended[row, head].tolist(), u.route[row, head].tolist()) for u in trace[1:]]
        assert ours == theirs
    assert any(update.appended.shape[-1] for update in trace[1:])
    assert (output - expected).abs().max() <= 1e-11


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "defaults"])
def test_every_variant_is_another_operator(name):
    default = run_case("defaults")
    torch.manual_seed(0)
    assert (run_case(name) - default).abs().max() > 1e-3


def run_case(name):
    arguments, settings = case(name, 23)
    return kvm_attention(**arguments, **settings)


def test_defaults_are_the_paper():
    arguments = inputs(23, batch=2, heads=4, kv_heads=2)
    assert torch.equal(
        kvm_attention(**arguments, **SETTINGS, **DEFAULTS), kvm_attention(**arguments, **SETTINGS)
    )


@pytest.mark.parametrize("name", VARIANTS)
@hypothesis_settings(max_examples=10)
@given(
    splits=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    chunk_size=st.integers(2, 4),
    window_chunks=st.integers(1, 3),
)
def test_any_split(name, splits, chunk_size, window_chunks):
    arguments, settings = case(name, sum(splits), batch=2, heads=4, kv_heads=2)
    settings |= {"chunk_size": chunk_size, "window_chunks": window_chunks, "return_memory": True}
    whole, expected = kvm_attention(**arguments, **settings)
    memory, outputs, start = None, [], 0
    for length in splits:
        part = {
            n: t[:, :, start : start + length] if n in SEQUENCES else t
            for n, t in arguments.items()
        }
        output, memory = kvm_attention(**part, **settings, memory=memory)
        outputs.append(output)
        start += length
    assert (torch.cat(outputs, dim=2) - whole).abs().max() <= 1e-10
    for ours, theirs in zip(memory.tensors(), expected.tensors(), strict=True):
        assert (ours - theirs).abs().max() <= 1e-10


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])  # 1, C - 1, C, C + 1, 2 C + 3
@pytest.mark.parametrize("name", VARIANTS)
def test_gradients(name, length):
    torch.manual_seed(5)  # in every case, the smallest margin of a choice is far above the step
    arguments, settings = case(name, length, value_dim=2)
    _, updates, margin = oracle(arguments, settings)
    assert margin > 1e-4
    if length == 9:
        ((appended, route),) = updates[0, 0]  # one token appended, two merged
        assert len(appended) == 1 and min(route) == -1 < max(route)

    def run(*tensors):
        return kvm_attention(**dict(zip(arguments, tensors, strict=True)), **settings)

    assert gradcheck(run, [t.requires_grad_() for t in arguments.values()], eps=1e-6, atol=1e-6)


# ------------------------------------------------------------------------- which are appended


def test_all_appends_take_the_same_number_of_rows():
    arguments = inputs(60, batch=2, heads=4, kv_heads=2)
    counts = []
    for append in ("novelty", "random", "recent", "gate"):
        trace: list = []
        kvm_attention(**arguments, **SETTINGS, append=append, trace=trace)
        counts.append([update.rows.count for update in trace])
        assert all(update.novelty is not None for update in trace[1:])
        for update in trace[1:]:
            assert (update.appended.diff(dim=-1) > 0).all()  # position order
    assert all(found == counts[0] for found in counts)


def choose_tokens(append, gate, *, start=0, count=2, heads=1, batch=1, dtype=torch.float32):
    """Indices that `selection` returns for equally novel tokens."""
    novelty = torch.zeros(batch, heads, len(gate), dtype=dtype)
    options = KVMOptions(rotary_dim=0, budget=lambda seen: 1, append=append)
    gate = torch.tensor(gate, dtype=dtype).expand_as(novelty)
    return selection(novelty, torch.zeros(batch, heads, 1), gate, start, count, options)


def test_selections_worked_out_by_hand():
    gate = [0.5, 2.0, 1.0, 2.0, 2.0, 0.1]
    assert choose_tokens("novelty", gate).flatten().tolist() == [0, 1]
    assert choose_tokens("recent", gate).flatten().tolist() == [4, 5]
    assert choose_tokens("gate", gate).flatten().tolist() == [1, 3]  # of ties the earlier
    assert choose_tokens("gate", gate, count=4).flatten().tolist() == [1, 2, 3, 4]
    shaken = [x * (1 + 1e-7 * i) for i, x in enumerate(gate)]
    assert choose_tokens("gate", shaken).flatten().tolist() == [1, 3]  # noise does not decide
    for append in ("novelty", "random", "recent", "gate"):
        assert choose_tokens(append, gate, count=0).shape == (1, 1, 0)
        assert choose_tokens(append, gate, count=6).flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_random_never_changes():
    """Recorded draws: results of studies depend on them."""
    first = choose_tokens("random", [1.0] * 16, count=4, heads=3)
    later = choose_tokens("random", [1.0] * 16, start=2**31 + 16, count=4, heads=3)
    assert first[0].tolist() == [[0, 9, 13, 14], [5, 8, 10, 15], [2, 9, 10, 11]]
    assert later[0].tolist() == [[5, 9, 13, 15], [1, 5, 6, 15], [2, 6, 9, 13]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_a_batch_draw_alike_and_heads_do_not(dtype):
    chosen = choose_tokens("random", [1.0] * 64, count=8, heads=2, batch=3, dtype=dtype)
    assert torch.equal(
        chosen, choose_tokens("random", [1.0] * 64, count=8, heads=2).expand(3, 2, 8)
    )
    assert not torch.equal(chosen[:, 0], chosen[:, 1])


def test_random_draws_are_splitmix64():
    outputs = splitmix64(torch.tensor(0), torch.arange(3))
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # of seed 0
    assert outputs.tolist() == [signed(x) for x in published]
    positions = [0, 1, 255, 256, 2**31, 2**40 + 3]
    for head, draws in enumerate(random_draws(torch.tensor(positions), heads=5).tolist()):
        assert draws == [signed(mixed(mixed(0, head), position)) for position in positions]


def test_random_draws_favour_no_place():
    blocks = random_draws(torch.arange(4096 * 8), heads=2).view(2, 4096, 8)
    taken = torch.zeros(2, 8).scatter_add(
        1, blocks.argsort(dim=-1)[..., :2].flatten(1), torch.ones(2, 8192)
    )
    assert (taken - 1024).abs().max() < 5 * (1024 * 0.75) ** 0.5  # five standard deviations


# ------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize("name", CONTROLS)
def test_half_precision_is_near(name):
    arguments, settings = case(name, 60, heads=4, kv_heads=2, dtype=torch.float32)
    half = {n: t.bfloat16() for n, t in arguments.items()}
    output = kvm_attention(**half, **settings)
    assert output.dtype == torch.bfloat16
    exact = kvm_attention(**{n: t.float() for n, t in half.items()}, **settings)
    assert (output.float() - exact).abs().median() <= 0.02


@each_backend
def test_raw_sums_may_exceed_half_precision(backend):
    arguments, settings = case("read_raw", 60, dtype=torch.float32)
    arguments["key"] = arguments["key"][:, :, :1].expand_as(arguments["key"])  # one row for all
    arguments["norm_weight"] *= 1e4
    arguments["query"] *= 1e-4
    half = {n: t.half() for n, t in arguments.items()}
    output, memory = kvm_attention(**half, **settings, return_memory=True, backend=backend)
    assert memory.rows.key.abs().max() > torch.finfo(torch.float16).max
    assert torch.isfinite(output).all()
