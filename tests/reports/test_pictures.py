"""Pictures of masks and of tokens: files, numbers and words."""

import numpy as np
import pytest

from meanbank.reports import (
    MaskPanel,
    MemoryPanel,
    draw_mask,
    draw_token_fates,
    write_mask,
    write_token_fates,
)
from meanbank.reports.palette import FORM_COLORS

PNG = b"\x89PNG\r\n\x1a\n"
FORMS = ("later", "not seen", "exact", "sink")
FATES = ("sink", "own row", "merged", "window")


def mask(layers=(0, 1, 4)) -> MaskPanel:
    forms = np.array([[2, 0, 0, 0], [2, 2, 0, 0], [3, 2, 2, 0], [3, 1, 2, 2]], dtype=np.int8)
    return MaskPanel(layers=layers, memory="window of 2", forms=forms)


def test_masks(tmp_path):
    words = draw_mask([mask(), mask((2,))], FORMS, tmp_path / "mask.png")
    assert (tmp_path / "mask.png").read_bytes().startswith(PNG)
    seen = "of 4 tokens, the last query sees 1 not at all, 2 exactly and 1 as the sink."
    assert words == f"Layers 0-1, 4 (window of 2): {seen} Layer 2 (window of 2): {seen}"
    write_mask([mask()], FORMS, tmp_path / "mask.csv")
    assert (tmp_path / "mask.csv").read_text().splitlines() == [
        "layers,memory,query,first,last,form",
        '"0-1, 4",window of 2,0,0,0,exact',
        '"0-1, 4",window of 2,1,0,1,exact',
        '"0-1, 4",window of 2,2,0,0,sink',
        '"0-1, 4",window of 2,2,1,2,exact',
        '"0-1, 4",window of 2,3,0,0,sink',
        '"0-1, 4",window of 2,3,1,1,not seen',
        '"0-1, 4",window of 2,3,2,3,exact',
    ]


def test_equal_masks_give_equal_files(tmp_path):
    for name in ("a.png", "b.png"):
        draw_mask([mask()], FORMS, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("layers", [1, 5])
def test_token_fates(tmp_path, layers):
    # row 0 is the sink; token 1 was merged into the row of token 2
    fates = np.array([[0, 2, 1, 3], [0, 1, 1, 3]], dtype=np.int8)
    rows = np.array([[0, 1, 1, -1], [0, 1, 2, -1]], dtype=np.int32)
    panels = [
        MemoryPanel(layer=layer, memory="kvm", heads=(0, 3), fates=fates, rows=rows)
        for layer in range(layers)
    ]
    words = draw_token_fates(panels, FATES, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(PNG)
    assert words.startswith("Layer 0 (kvm): of 4 tokens a head, 1 sink, ")
    assert "the largest row has 2 tokens, 80% of rows have one." in words
    write_token_fates(panels, FATES, ["a", "\n", '"', "é"], tmp_path / "memory.csv")
    lines = (tmp_path / "memory.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + layers * 8
    assert lines[:6] == [
        "layer,head,position,token,row,fate",
        "0,0,0,a,0,sink",
        "0,0,1,\\n,1,merged",
        '0,0,2,"\\""",1,own row',
        "0,0,3,é,,window",
        "0,3,0,a,0,sink",
    ]


def test_forms_that_can_stand_beside_each_other_have_colours_of_their_own():
    for names in (set(FORM_COLORS) - {"window", "merged"}, set(FATES)):
        assert len({FORM_COLORS[name] for name in names}) == len(names)


def test_many_heads_have_one_label_a_layer(tmp_path):
    panels = [
        MemoryPanel(
            layer=layer,
            memory="kvm",
            heads=tuple(range(31)),
            fates=np.full((31, 4), 3, dtype=np.int8),
            rows=np.full((31, 4), -1, dtype=np.int32),
        )
        for layer in range(2)
    ]
    panels[0].fates[:, 0], panels[0].rows[:, 0] = 0, 0  # the other layer has no rows yet
    words = draw_token_fates(panels, FATES, tmp_path / "memory.png")
    assert words.endswith("Layer 1 (kvm): of 4 tokens a head, 4 still exact; no rows yet.")
