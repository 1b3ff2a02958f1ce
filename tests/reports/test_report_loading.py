import json
import shutil
from pathlib import Path

import pytest

from meanbank.reports import load_demo
from tests.reports.report_files import write_json, write_run


def test_reads_a_complete_demo(demo: Path) -> None:
    results = load_demo(demo)
    assert [arm.name for arm in results.language] == [
        "full",
        "block_window",
        "kvm_fixed",
        "kvm_sqrt",
        "kvm_sqrt_bank",
    ]
    bank = results.language[-1]
    assert bank.label == "KVM, 4·sqrt(N) rows + bank"
    assert bank.run and bank.run.parameters == 1_234_567
    assert bank.position_loss and set(bank.position_loss.at) == {1, 2, 4, 8}
    assert bank.memory and bank.memory.table_bytes == 3 * 2**20
    assert len(bank.run.curve.losses) == 300 and len(bank.run.curve.held_out) == 6
    assert results.recall_seeds == [0, 1]
    assert results.recall_settings == [(128, 12), (512, 12), (1024, 12), (128, 24), (512, 48)]
    assert results.recall[1].mean((512, 48)) == pytest.approx(0.344)
    assert results.bigram and results.bigram.bits_per_byte == 2.345
    assert results.samples[0].arm == "kvm_sqrt_bank"


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_without_results_says_what_to_do(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "nothing"
    if exists:
        folder.mkdir()
    with pytest.raises(ValueError, match="run `meanbank demo --out") as caught:
        load_demo(folder)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_demo(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(ValueError, match="no results"):
        load_demo(file)


def test_a_damaged_result_is_named(demo: Path) -> None:
    damaged = demo / "language" / "full" / "evaluations" / "bpb.json"
    damaged.write_text('{"task": "bpb", ')
    with pytest.raises(ValueError, match=r"bpb\.json is not valid JSON"):
        load_demo(demo)


def test_torn_and_repeated_lines_of_metrics(demo: Path) -> None:
    metrics = demo / "language" / "full" / "metrics.jsonl"
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 9.0}, {"step": 2, "loss": 2.5}]
    metrics.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "lo')
    run = load_demo(demo).language[0].run
    assert run and run.curve.losses == ((1, 3.0), (2, 2.5))


def test_any_seeds_and_an_interrupted_run(tmp_path: Path) -> None:
    write_run(tmp_path / "recall" / "kvm_sqrt-seed10", "KVM", steps=1, seed=10)
    write_run(tmp_path / "recall" / "kvm_sqrt-seed2", "KVM", steps=1, seed=2)
    (tmp_path / "recall" / "kvm_sqrt-seedx").mkdir()
    results = load_demo(tmp_path)
    assert results.recall_seeds == [2, 10]
    assert results.recall_settings == []


def test_values_of_the_wrong_kind_count_as_missing(demo: Path) -> None:
    evaluations = demo / "language" / "full" / "evaluations"
    write_json(evaluations / "bpb.json", {"results": {"bpb": "low"}})
    write_json(evaluations / "memory.json", {"results": {"contexts": [{"tokens": 1}, 3]}})
    write_json(evaluations / "position-loss.json", {"results": {"buckets": None, "at": []}})
    write_json(evaluations / "decode-speed.json", [1])
    shutil.rmtree(demo / "recall")
    full = load_demo(demo).language[0]
    assert full.bits_per_byte is None and full.decode_speed is None
    assert full.memory and not full.memory.bytes_at
    assert full.position_loss and not full.position_loss.buckets
