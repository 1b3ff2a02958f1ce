"""Arms that are held against another one: the differences, their intervals, the pictures."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from meanbank.reports.palette import arm_styles
from meanbank.reports.study import load_study
from meanbank.reports.study.accuracies import accuracy_by_length_and_pairs
from meanbank.reports.study.document import figures_of, short_document, study_document
from meanbank.reports.study.figure import MOST_ARMS, Figure
from meanbank.reports.study.results import Study
from tests.reports.study_files import SEEDS, write_evaluation, write_json, write_lines
from tests.reports.test_study_figures import drawn, rows

MANY = [f"arm{n}" for n in range(MOST_ARMS + 1)]
CELLS = [(128, 12, 0.9), (512, 12, 0.7), (512, 48, 0.5)]  # length, pairs, accuracy of the first
MORE = (2048, 6, 0.4)  # that only the first one was asked
# By which seeds of an arm are above the first one; all others are exactly as good.
ABOVE = {"arm1": (0.04, 0.05, 0.06), "arm2": (-0.09, 0.1, 0.0)}


def figures(study: Study) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures_of(study_document(study))}


def grid(above: float, cells: list[tuple[int, int, float]]) -> dict[str, object]:
    found = [{"length": n, "pairs": p, "accuracy": mean + above} for n, p, mean in cells]
    return {"grid": found, "chance": 0.1}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """More arms than looks, held against one of another group; the second one was changed, too."""
    folder = tmp_path_factory.mktemp("large")
    groups = {
        "first": {"arms": {"arm0": {"label": "The first"}}},
        "others": {"reference": "arm0", "arms": {name: {"label": name} for name in MANY[1:]}},
    }
    write_json(folder / "study.yaml", {"title": "Many", "seeds": list(SEEDS), "groups": groups})
    lines = []
    for arm in MANY:
        asked = [*CELLS, MORE] if arm == "arm0" else CELLS
        for seed, above in zip(SEEDS, ABOVE.get(arm, (0.0, 0.0, 0.0)), strict=True):
            place = f"runs/{arm}/seed-{seed}"
            write_evaluation(folder / place, "recall", "recall", grid(above, asked), {})
            titles = ["recall"]
            if arm == "arm1":
                write_evaluation(folder / place, "as-8", "changed", grid(above - 0.4, CELLS), {})
                titles.append("as-8")
            lines.append(
                {
                    "group": "first" if arm == "arm0" else "others",
                    "arm": arm,
                    "seed": seed,
                    "evaluations": {title: f"{place}/evaluations/{title}.json" for title in titles},
                }
            )
    write_lines(folder / "results.jsonl", lines)
    return load_study(folder)


def test_bits_per_byte_are_held_against_the_first_arm_of_the_same_seed(finished_study) -> None:
    study = load_study(finished_study)
    first, second = (arm.values("bpb") for arm in study.groups[2].arms[:2])
    apart = [second[seed] - first[seed] for seed in SEEDS]
    figure = figures(study)["bank-bpb"]
    table = {row["arm"]: row for row in rows(figure)}
    assert table["bank_standard"]["difference"] == ""
    row = table["bank_bank"]
    assert float(row["difference"]) == pytest.approx(sum(apart) / 3)
    assert [float(each) for each in row["of_seeds"].split()] == pytest.approx(apart)
    assert float(row["difference_high"]) > max(apart), "a t interval of three seeds is wide"
    assert float(row["bits_per_byte"]) == pytest.approx(sum(second.values()) / 3)
    (axes,) = drawn(figure).axes
    middles = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "D"]
    assert middles == [float(r["difference"]) for r in table.values() if r["difference"]]
    least = min(table, key=lambda arm: float(table[arm]["bits_per_byte"]))
    assert f"The best is {study.groups[2].labels[least]} with" in figure.caption


def test_a_reference_may_be_of_another_group(large: Study) -> None:
    found = rows(figures(large)["others-recall"])
    assert (found[0]["arm"], found[0]["difference"]) == ("arm0", ""), "it stands first"
    assert {row["setting"] for row in found} == {f"{n}/{p}" for n, p, _ in CELLS}
    few = dataclasses.replace(large.groups[1], arms=large.groups[1].arms[:2])
    looks = arm_styles([[arm.name for arm in few.with_reference]])
    (figure,) = accuracy_by_length_and_pairs(few, looks)
    assert {(row["arm"], row["length"]) for row in rows(figure)} == {
        (arm, str(n)) for arm in MANY[:3] for n, *_ in CELLS
    }
    assert len({style.color for style in looks.values()}) == 3


def test_many_arms_are_a_map_in_colours_and_no_lines(large: Study) -> None:
    found = figures(large)
    assert list(found) == ["first-recall", "others-recall", "others-changed"]
    figure = found["others-recall"]
    table = {(row["arm"], row["setting"]): row for row in rows(figure)}
    assert len(table) == len(MANY) * len(CELLS)
    sure, unsure, equal = (table[arm, "512/48"] for arm in ("arm1", "arm2", "arm3"))
    assert float(sure["difference"]) == pytest.approx(0.05) and sure["accuracy"][:4] == "0.55"
    assert float(sure["difference_low"]) > 0 > float(unsure["difference_low"])
    assert float(equal["difference"]) == 0
    (axes,) = drawn(figure).axes
    texts = {(round(t.get_position()[1], 2), t.get_position()[0]): t for t in axes.texts}
    assert len(texts) == len(table) == len(axes.patches)
    bold = {text.get_position()[1] for text in axes.texts if text.get_fontweight() == "bold"}
    places = dict(zip(MANY, axes.get_yticks(), strict=True))
    assert places["arm1"] in bold and not {places["arm2"], places["arm3"]} & bold
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "128\n/12",
        "512\n/12",
        "512\n/48",
    ]


def test_a_changed_memory_is_held_against_the_same_arm_unchanged(large: Study) -> None:
    table = {(row["arm"], row["setting"]): row for row in rows(figures(large)["others-changed"])}
    assert {arm for arm, _ in table} == {"arm1", "arm1 as-8"}
    assert float(table["arm1 as-8", "512/12"]["difference"]) == pytest.approx(-0.4)
    assert float(table["arm1", "512/12"]["accuracy"]) == pytest.approx(0.75)


def test_an_unknown_reference_is_the_first_arm(study: Path) -> None:
    plan = json.loads((study / "study.yaml").read_text())
    plan["groups"]["bank"]["reference"] = "nobody"
    write_json(study / "study.yaml", plan)
    group = load_study(study).groups[2]
    assert group.reference == group.arms[0]


def test_scores_without_numbers_are_left_out(study: Path) -> None:
    path = study / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["group"] == "bank" and line["arm"] != "bank_mixed":
            line["scores"]["bpb"] = float("nan")
    write_lines(path, lines)
    assert "bank-bpb" not in figures(load_study(study)), "one arm alone is held against nothing"


def test_a_published_page_has_scores_machine_and_time(finished_study, tmp_path) -> None:
    folder = Path(shutil.copytree(finished_study, tmp_path / "study"))
    sections = {section.title: section for section in short_document(load_study(folder))}
    (facts,) = sections["How it was made"].blocks
    names = dict(facts.items)
    assert names["PyTorch"] == "2.13.0" and names["Runs"] == "46"
    assert names["Counted"] == "11, 12, 13"
    assert names["Computing time, one run after the other"] == "1.5 h"
    titles = [block.title for block in sections["Values from a bank"].blocks]
    assert titles[:2] == ["Scores", "Scores: core"]
