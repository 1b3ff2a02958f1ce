"""The studies that come with meanbank can be run, and compare like with like."""

import pytest

from meanbank.core.bundled import bundled
from meanbank.studies.resolve import load_study
from meanbank.training.planning import training_tokens

NAMES = sorted(path.stem for path in bundled("studies").glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_they_resolve_and_state_their_seeds(name):
    study = load_study(name)
    assert study.claims
    for group in study.groups.values():
        trained = [arm.config for arm in group.arms.values() if arm.is_trained_here]
        assert len({*map(training_tokens, trained)}) <= 1, "arms are trained on as many tokens"
        assert len({config.data for config in trained}) <= 1, "and on the same ones"


def test_the_quick_studys_seeds_were_not_tuned_on():
    study = load_study("quick")
    assert study.seeds == (101, 102, 103)
    assert study.tuning_seeds == ()


def test_its_language_models_really_use_their_memory():
    """A chunk is at most a sixteenth of the training length; the window arm has KVM's window."""
    arms = load_study("quick").groups["language"].arms
    memories = {name: arm.config.model_config(10).plans()[0].memory for name, arm in arms.items()}
    window = memories["lm_block_window"]
    for name, memory in memories.items():
        if name.startswith("lm_kvm"):
            assert 16 * memory.chunk_size <= arms[name].config.data.sequence_length
            assert memory.window_chunks * memory.chunk_size == window.block_size * window.blocks
        assert arms[name].config.training == arms["lm_full"].config.training
