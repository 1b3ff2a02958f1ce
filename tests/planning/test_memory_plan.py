"""What `meanbank plan --context` counts, against models and caches that are there."""

import json

import pytest
import torch
import yaml

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.benchmarks.peak import peak_bytes
from meanbank.benchmarks.settings import Machine
from meanbank.cli import main
from meanbank.cli.amounts import bytes_of, tokens_of, told
from meanbank.model import set_table_gradients
from meanbank.model.accounting import empty_model
from meanbank.model.bank_plan import break_even
from meanbank.model.memory_plan import (
    empty_cache,
    largest_context,
    layer_bytes,
    nbytes_of_call,
    optimizer_nbytes,
    serving_bytes,
    state_by_part,
    training_bytes,
    weight_nbytes,
)
from tests.conformance.models import MEMORIES, SOURCES, make_model

LENGTHS = (1, 9, 16, 23)  # on and off the ends of chunks
CASES = {  # backbone, dtype, batch
    "gptalpha2": (torch.float32, 1),
    "nanochat": (torch.bfloat16, 3),
}


def check_states(memory: str, source: str, backbone: str) -> None:
    """At every length a cache holds just the tensors that are planned, and the bytes by part."""
    dtype, batch = CASES[backbone]
    model = make_model(memory, source, "grouped", dtype, backbone=backbone)
    ids = torch.randint(0, 40, (batch, LENGTHS[-1]))
    cache, read = model.model.new_cache(), 0
    for length in LENGTHS:
        with torch.inference_mode():
            model(ids[:, read:length], cache=cache)
        read = length
        planned = empty_cache(model, length, batch)
        for layer, expected in zip(cache.layers, planned.layers, strict=True):
            if layer.state is not None or expected.state is not None:
                shapes = [
                    [(tensor.shape, tensor.dtype) for tensor in state.tensors()]
                    for state in (layer.state, expected.state)
                ]
                assert shapes[0] == shapes[1]
        parts = state_by_part(model, length, batch)
        if length > 1:  # later calls put stored values together, so that no layer shares them
            assert sum(parts.values()) == cache.nbytes()
        held: dict[str, int] = {}
        described = cache.describe().layers
        for layer in described:
            for part, size in layer.nbytes.items():
                held[part] = held.get(part, 0) + size
        parts["exact tokens"] = parts.get("exact tokens", 0) + parts.pop("token ids", 0)
        assert {k: v for k, v in parts.items() if v} == {k: v for k, v in held.items() if v}
        by_layer = [sum(layer.state.values()) for layer in layer_bytes(model, length, batch)]
        found = [sum(layer.nbytes.values()) for layer in described]
        assert by_layer == found[: len(by_layer)]


@pytest.mark.parametrize("backbone", CASES)
@pytest.mark.parametrize("source", ["projection", "bank"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_states_are_exact(memory, source, backbone):
    check_states(memory, source, backbone)


@pytest.mark.parametrize("source", [name for name in SOURCES if name not in ("projection", "bank")])
def test_states_of_every_source_are_exact(source):
    for memory in ("full", "kvm_power_law", "rwkv7"):
        check_states(memory, source, "gptalpha2")


def test_weights_are_exact():
    model = make_model("full", "bank", "grouped", torch.bfloat16)
    weights, tables = weight_nbytes(empty_model(model.config).to(torch.bfloat16))
    assert tables == 2 * 40 * 2 * 6 * 2  # two layers, 40 ids, 2 heads of 6 channels, bf16
    assert weights + tables == sum(p.numel() * p.element_size() for p in model.parameters())


CHUNK, BATCH = 32, 2
PEAKS = {
    "full": {"type": "full"},
    "sliding_window": {"type": "sliding_window", "window": 50, "sink": 2},
    "block_window": {"type": "block_window", "block_size": CHUNK, "blocks": 2},
    "kvm": {"type": "kvm", "chunk_size": CHUNK, "budget": {"type": "power_law", "factor": 8}},
    "ovq": {"type": "ovq", "chunk_size": CHUNK, "budget": {"type": "saturating", "limit": 100}},
    "rwkv7": {"type": "rwkv7"},
}


def sized(memory: str, source: str, **settings) -> MeanbankConfig:
    """A model large enough for a kernel's own few kilobytes not to matter."""
    return MeanbankConfig(
        **{
            "vocab_size": 300,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4 if memory == "rwkv7" else 2,
            "head_dim": 16,
            "plan": [{"memory": PEAKS[memory]}, {"where": [1], "values": source}],
            **settings,
        }
    )


@pytest.mark.parametrize(
    ("backbone", "source"), [("gptalpha2", "projection"), ("nanochat", "bank")]
)
@pytest.mark.parametrize("memory", PEAKS)
def test_peaks_are_within_a_tenth(backbone, memory, source):
    check_peaks(sized(memory, source, backbone=backbone))


def test_peaks_of_attention_that_holds_all_scores():
    check_peaks(sized("full", "bank", value_head_dim=8))  # no kernel takes other widths


@pytest.mark.parametrize("source", ["bank", {"type": "bank", "table": "shared"}])
def test_sparse_gradients_of_tables_are_counted_as_what_was_looked_up(source):
    where = [{"memory": "full"}, {"where": [1, 2], "values": source}]
    sizes = {"value_head_dim": 128, "vocab_size": 2000, "num_hidden_layers": 3}
    config = sized("full", "bank", **sizes, plan=where)
    planned = {}
    for gradients in ("dense", "sparse"):
        model, empty = MeanbankForCausalLM(config), empty_model(config)
        set_table_gradients(model, gradients)
        set_table_gradients(empty, gradients)
        ids = torch.randint(0, 2000, (BATCH, 20))
        with Machine().settled():
            found = peak_bytes(lambda model=model, ids=ids: backward(model, ids), Machine())
        planned[gradients] = training_bytes(empty, 20, BATCH).activations
        assert planned[gradients] >= 0.99 * found
    assert planned["sparse"] == pytest.approx(found, rel=0.01)
    assert planned["sparse"] < planned["dense"] - 2000 * 2 * 128 * 4


def check_peaks(config: MeanbankConfig) -> None:
    with Machine().settled():
        _check_peaks(config)


def _check_peaks(config: MeanbankConfig) -> None:
    model, empty = MeanbankForCausalLM(config), empty_model(config)
    # a piece of a prompt, a token that makes a block leave the window, and one that does not
    for seen, length in ((130, 70), (128, 1), (140, 1)):
        ids = torch.randint(0, 300, (BATCH, seen + length))
        cache = model.model.new_cache()
        model.prefill(ids[:, :100], cache=cache)  # twice: no layer shares values any more
        model.prefill(ids[:, 100:seen], cache=cache)
        held = cache.nbytes()

        @torch.no_grad()
        def call(new=ids[:, seen:], cache=cache):
            return model(new, cache=cache, logits_to_keep=1)

        found = held + peak_bytes(call, Machine())
        assert nbytes_of_call(empty, seen, length, BATCH) == pytest.approx(found, rel=0.1)

    ids = torch.randint(0, 300, (BATCH, 100))
    kept, again = (training_bytes(empty, 100, BATCH, checkpointing=c) for c in (False, True))
    assert not empty.is_activation_checkpointing
    assert training_bytes(empty.eval(), 100, BATCH, checkpointing=True) == again
    assert not empty.training
    found = peak_bytes(lambda: backward(model, ids), Machine())
    assert kept.activations == pytest.approx(found, rel=0.1)
    model.train().activation_checkpointing_enable()
    model.zero_grad()
    found = peak_bytes(lambda: backward(model, ids), Machine())
    assert again.activations == pytest.approx(found, rel=0.1)


def backward(model: MeanbankForCausalLM, ids: torch.Tensor) -> None:
    model(ids, targets=ids, use_cache=False).loss.backward()


LARGE = {"type": "kvm", "chunk_size": 512, "budget": {"type": "power_law", "factor": 8}}


def large_chunks() -> MeanbankForCausalLM:
    """KVM in few chunks, which are counted faster."""
    plan = [{"memory": LARGE, "values": "bank"}]
    return empty_model(sized("kvm", "bank", plan=plan, num_hidden_layers=1))


def test_totals_add_up():
    model = large_chunks().to(torch.bfloat16)
    serving = serving_bytes(model, 3000, batch=4)
    held = serving.weights + serving.tables + sum(serving.state.values())
    reading = nbytes_of_call(model, 3000 - 2048, 2048, 4)  # the last piece of the prompt
    decoding = nbytes_of_call(model, 2999, 1, 4)
    assert held + serving.prefill == serving.weights + serving.tables + reading
    assert serving.decode == max(0, decoding - sum(serving.state.values()))
    assert serving.total == held + max(serving.prefill, serving.decode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", ["full", "kvm"])
def test_the_same_is_told_each_time(memory, dtype):
    model = large_chunks() if memory == "kvm" else empty_model(sized("full", "bank"))
    first, again = (nbytes_of_call(model.to(dtype), 2997, 1, 3) for _ in range(2))
    assert first == again


def test_optimizers_keep_two_moments_or_one():
    weight = torch.nn.Parameter(torch.zeros(3, 5))
    groups = [{"params": [weight], "betas": (0.9, 0.95)}, {"params": [weight, weight]}]
    assert optimizer_nbytes(groups) == (2 + 2) * 15 * 4


@pytest.mark.parametrize("memory", ["full", "kvm"])
def test_the_largest_context(memory):
    model = large_chunks() if memory == "kvm" else empty_model(sized("full", "bank"))
    budget = serving_bytes(model, 3000, batch=2).total + 1000
    most = largest_context(model, budget, batch=2)
    assert most is not None
    assert serving_bytes(model, most, batch=2).total <= budget
    assert serving_bytes(model, most + most // 50, batch=2).total > budget
    assert largest_context(model, 1000) == 0


def test_any_context_fits_a_window():
    model = empty_model(sized("sliding_window", "bank"))
    assert largest_context(model, serving_bytes(model, 10_000).total) is None


def test_where_a_bank_pays_off():
    """Its table against the values of a model that projects them, state by state."""
    bank, projected = (
        empty_model(sized("full", source, num_attention_heads=8, vocab_size=3000))
        for source in ("bank", "projection")
    )
    (point,) = break_even(bank, batch=3)
    assert (point.table, point.value_weights) == (3000 * 32 * 4, 64 * 32 * 4)
    assert (point.saved, point.batch_size) == (32 * 4 - 4, 1)

    def pays(context: int) -> bool:
        exact = [
            sum(
                layer_bytes(model, context, 3)[1].state.get(part, 0)
                for part in ("exact tokens", "token ids")
            )
            for model in (bank, projected)
        ]
        return point.table <= point.value_weights + exact[1] - exact[0]

    assert point.context is not None
    assert pays(point.context)
    assert not pays(point.context - 1)


def test_where_a_bank_never_pays_off():
    window = empty_model(sized("sliding_window", "bank", vocab_size=3000))
    (point,) = break_even(window, batch=3)
    assert point.context is None
    assert point.batch_size == -(-point.tokens // (50 - 1 + 2))
    (enough,) = break_even(window, batch=point.batch_size)
    assert enough.context == -(-point.tokens // point.batch_size)
    (matrix,) = break_even(empty_model(sized("rwkv7", "bank")))
    assert (matrix.context, matrix.batch_size) == (None, None)
    assert break_even(empty_model(sized("full", "projection"))) == ()


def test_a_shared_table_is_shared_out():
    shared = [{"memory": "full", "values": {"type": "bank", "table": "shared"}}]
    points = break_even(empty_model(sized("full", "bank", plan=shared)))
    assert [point.table for point in points] == [300 * 32 * 4 // 2] * 2


def test_amounts():
    assert [tokens_of("n", text) for text in ("4096", "128K", "1M", "1_000_000", "0.5k")] == [
        4096, 131072, 1048576, 1_000_000, 512,
    ]  # fmt: skip
    assert [bytes_of("n", text) for text in ("24GB", "24GiB", "1.5 mb", "12")] == [
        24 * 10**9, 24 * 2**30, 1_500_000, 12,
    ]  # fmt: skip
    for text in ("", "0", "-1", "1X", "many", "1e9", "24G B", "9999999T"):
        with pytest.raises(ValueError, match="must be a positive number of bytes"):
            bytes_of("n", text)
    assert [told(n) for n in (0, 999, 1000, 12_345, 999_600, 24 * 10**9)] == [
        "0 B", "999 B", "1.00 kB", "12.3 kB", "1.00 MB", "24.0 GB",
    ]  # fmt: skip


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code or 0


@pytest.fixture
def config(tmp_path) -> str:
    model = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model["plan"] = [{"memory": "full"}, {"where": [1], "values": "bank"}]
    settings = {
        "model": model,
        "data": {"vocab_size": 300, "sequence_length": 32, "batch_size": 4},
        "training": {"steps": 10, "recipe": "kvm"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return str(path)


def test_the_command_line(config, tmp_path, capsys):
    out = tmp_path / "plan.json"
    sizes = ("--context", "1M", "--batch", "8", "--dtype", "bf16", "--budget", "24GB")
    assert run("plan", config, *sizes, "--train-length", "64", "--json", str(out)) == 0
    printed = capsys.readouterr().out
    for words in ("bytes of serving 8 x 1,048,576 tokens (bfloat16)", "ids of exact tokens"):
        assert words in printed
    for words in ("largest context in 24.0 GB", "where a bank pays off", "from token 1", "4 x 64"):
        assert words in printed
    found = json.loads(out.read_text())["footprint"]
    serving, full = found["plan"]["serving"], found["full_attention"]["serving"]
    tokens = 8 * 2**20
    assert serving["state"]["token ids"] == tokens * 4
    assert serving["state"]["exact tokens"] == tokens * (2 * 32 + 32) * 2
    assert full["state"]["exact tokens"] == tokens * 4 * 32 * 2
    assert serving["total"] < full["total"]
    assert found["plan"]["largest_context"] > found["full_attention"]["largest_context"]
    assert found["plan"]["training"]["total"] > found["plan"]["training"]["activations"] > 0
    assert found["break_even"][0]["context"] > 0


def test_the_command_line_plans_the_runs_checkpointing(config, tmp_path):
    activations = []
    for checkpointing in ("none", "blocks"):
        out = tmp_path / f"{checkpointing}.json"
        setting = f"training.checkpointing={checkpointing}"
        assert run("plan", config, "--set", setting, "--train-length=1K", "--json", str(out)) == 0
        found = json.loads(out.read_text())["footprint"]
        activations.append(found["plan"]["training"]["activations"])
    assert activations[1] < 0.7 * activations[0]


def test_without_sizes_the_plan_is_as_before(config, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert run("plan", config, "--json", str(out)) == 0
    assert "bytes of serving" not in capsys.readouterr().out
    assert "footprint" not in json.loads(out.read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "1X"), "--context must be a positive number of tokens"),
        (("--context", ""), "--context must be a positive number of tokens"),
        (("--train-length", "0"), "--train-length must be"),
        (("--budget", "lots"), "--budget must be a positive number of bytes"),
        (("--batch", "0"), "--batch must be at least 1, got 0"),
        (("--dtype", "int8"), "unknown dtype 'int8'"),
        (("--match", "quick/full", "--by", "params", "--batch", "2"), "--match compares training"),
    ],
)
def test_errors_are_one_line(config, arguments, message, capsys):
    assert run("plan", config, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("meanbank: error: ")
    assert message in line
