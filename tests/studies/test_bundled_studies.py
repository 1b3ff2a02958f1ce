"""The studies that come with meanbank can be run, and compare like with like."""

import functools

import pytest

from meanbank.core.bundled import bundled
from meanbank.evaluation import BitsPerByte, Changed, PositionLoss, Recall
from meanbank.studies import resolve
from meanbank.training.planning import training_tokens

NAMES = sorted(path.stem for path in bundled("studies").glob("*.yaml"))
load_study = functools.cache(resolve.load_study)
OTHER_STEPS = {"kvm_8_long", "bank_flops"}  # arms that say so in their label


@pytest.mark.parametrize("name", NAMES)
def test_they_resolve_and_state_their_seeds(name):
    study = load_study(name)
    assert study.claims
    for group in study.groups.values():
        alike = [
            arm.config
            for arm_name, arm in group.arms.items()
            if arm.is_trained_here and arm_name not in OTHER_STEPS
        ]
        assert len({*map(training_tokens, alike)}) <= 1, "arms are trained on as many tokens"
        trained = [arm.config for arm in group.arms.values() if arm.is_trained_here]
        assert len({config.data for config in trained}) <= 1, "and on the same ones"


def scores_of(evaluation):
    """The names of its scores, of those that claims are about."""
    match evaluation:
        case Changed():
            return scores_of(evaluation.named)
        case Recall():
            return {evaluation.score(*setting) for setting in evaluation.grid}
        case PositionLoss():
            return {
                f"{evaluation.title}@{k}x" for k in (1, 2, 4, 8) if k <= (evaluation.multiple or 8)
            }
        case BitsPerByte():
            return {evaluation.title}
        case _:
            return set()


@pytest.mark.parametrize("name", NAMES)
def test_their_claims_can_be_measured(name):
    study = load_study(name)
    arms = study.arms
    for claim in study.claims:
        for score, arm in claim.parsed.terms:
            given = set().union(*map(scores_of, arms[arm].evaluations))
            assert score in given or not arms[arm].is_trained_here, claim.claim
        seeds = {arms[arm].seeds for arm in claim.parsed.arms}
        assert len(seeds) == 1, f"{claim.claim}: its arms have other seeds"
    assert sum(not claim.each for claim in study.claims) <= 16, "all are adjusted for"
    assert len({claim.says for claim in study.claims}) == len(study.claims)


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
