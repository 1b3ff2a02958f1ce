"""What transformers' own generation tests check of every model (tests/generation/test_utils.py).

Assisted generation and prompt lookup are in tests/conformance/test_assisted.py. Not applicable:
static, quantised and offloaded caches (refused, tested here); contrastive search, DoLa, group and
constrained beams, which transformers 5 no longer contains.
"""

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation import GenerationConfig

from tests.model.hf_models import (
    SYSTEMS,
    VOCABULARY,
    WITHOUT_BANK,
    left_padded,
    make_system,
    random_ids,
)

every_system = pytest.mark.parametrize("system", SYSTEMS)
GREEDY = {"do_sample": False, "max_new_tokens": 14}
MODES = {
    "greedy": GREEDY,
    "sampled": {"do_sample": True, "max_new_tokens": 10, "top_k": 0},
    "warped": {
        "do_sample": True,
        "max_new_tokens": 10,
        "top_k": 9,
        "top_p": 0.9,
        "temperature": 2.0,
    },
    "beams": {"do_sample": False, "max_new_tokens": 10, "num_beams": 3},
    "sampled_beams": {"do_sample": True, "max_new_tokens": 8, "num_beams": 2},
    "several": {"do_sample": True, "max_new_tokens": 8, "num_return_sequences": 3, "top_k": 0},
    "best_beams": {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2},
}


class Counted:
    """Counts the tokens that are embedded."""

    def __init__(self, model) -> None:
        self.calls: list[int] = []
        model.model.embedding.register_forward_hook(
            lambda module, inputs, output: self.calls.append(output.shape[1])
        )


@every_system
@pytest.mark.parametrize("mode", MODES)
def test_the_same_with_and_without_a_cache(system, mode):
    model, prompt = make_system(system), random_ids(2, 7)
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        counted = Counted(model)
        texts.append(model.generate(prompt, use_cache=use_cache, **MODES[mode]))
        if use_cache:  # the prompt once, then every token once
            assert counted.calls == [7] + [1] * (len(counted.calls) - 1)
    assert torch.equal(*texts)


@every_system
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_left_padded_batches_equal_single_prompts(system, mode):
    model = make_system(system)
    prompts = [random_ids(1, length)[0] for length in (9, 1, 5)]
    ids, mask = left_padded(prompts)
    options = {**MODES[mode], "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, **options)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], **options)[0, len(prompt) :]
        assert torch.equal(together[row, 9:], alone)


@every_system
def test_outputs_as_a_dictionary(system):
    model, prompt = make_system(system), random_ids(2, 6)
    output = model.generate(
        prompt,
        do_sample=False,
        max_new_tokens=5,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
    )
    assert len(output.scores) == len(output.logits) == len(output.hidden_states) == 5
    assert output.scores[0].shape == (2, VOCABULARY)
    lengths = [states[-1].shape[1] for states in output.hidden_states]
    assert lengths == [6, 1, 1, 1, 1]
    whole = model(output.sequences).logits
    assert torch.allclose(output.logits[4], whole[:, -2], atol=1e-5)
    assert output.cache.lengths == (10, 10)
    scores = model.compute_transition_scores(output.sequences, output.scores)
    assert scores.shape == (2, 5)
    beams = model.generate(
        prompt, max_new_tokens=4, num_beams=3, return_dict_in_generate=True, output_scores=True
    )
    assert beams.sequences_scores.shape == (2,)


@every_system
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_going_on_from_a_cache(system, name):
    model, prompt = make_system(system), random_ids(2, 9)
    whole = model.generate(prompt, **GREEDY)
    first = model.generate(prompt, do_sample=False, max_new_tokens=6, return_dict_in_generate=True)
    counted = Counted(model)
    rest = model.generate(first.sequences, do_sample=False, max_new_tokens=8, **{name: first.cache})
    assert torch.equal(rest, whole)
    assert counted.calls == [1] * 8  # only the last token was not read yet


@every_system
def test_reading_the_prompt_in_chunks(system):
    model, prompt = make_system(system), random_ids(2, 11)
    counted = Counted(model)
    chunked = model.generate(prompt, prefill_chunk_size=4, **GREEDY)
    assert counted.calls[:3] == [4, 4, 3]
    assert torch.equal(chunked, model.generate(prompt, **GREEDY))


@pytest.mark.parametrize("system", WITHOUT_BANK)
@pytest.mark.parametrize("beams", [1, 2])
def test_generating_from_embeddings(system, beams):
    model, prompt = make_system(system), random_ids(2, 8)
    embedded = model.get_input_embeddings()(prompt)
    options = {**GREEDY, "num_beams": beams}
    expected = model.generate(prompt, **options)
    assert torch.equal(model.generate(inputs_embeds=embedded, **options), expected[:, 8:])
    both = model.generate(prompt, inputs_embeds=embedded, **options)
    assert torch.equal(both, expected)


def test_a_bank_cannot_generate_from_embeddings():
    model = make_system("kvm_bank")
    embedded = model.get_input_embeddings()(random_ids(1, 4))
    with pytest.raises(ValueError, match="bank of values"):
        model.generate(inputs_embeds=embedded, max_new_tokens=2)


class Only(LogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([self.token]), 0.0)


class AtLength(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids, scores, **keywords):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Streamer:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


@every_system
def test_processors_stopping_streaming_and_special_tokens(system):
    model, prompt = make_system(system), random_ids(1, 5)
    text = model.generate(prompt, logits_processor=[Only(7)], **GREEDY)
    assert text[0, 5:].tolist() == [7] * 14
    assert model.generate(prompt, stopping_criteria=[AtLength(9)], **GREEDY).shape == (1, 9)
    streamer = Streamer()
    text = model.generate(prompt, streamer=streamer, **GREEDY)
    assert streamer.tokens == [*text[0].tolist(), -1]
    end = int(text[0, 7])
    stopped = model.generate(prompt, eos_token_id=end, pad_token_id=0, **GREEDY)
    assert stopped[0, -1] == end
    assert stopped.shape[1] <= 8
    assert end not in model.generate(prompt, bad_words_ids=[[end]], **GREEDY)[0, 5:]
    settings = GenerationConfig(max_new_tokens=3, do_sample=False, repetition_penalty=1.5)
    assert model.generate(prompt, settings).shape == (1, 8)
    assert model.generate(bos_token_id=1, max_new_tokens=3, do_sample=False).shape == (1, 4)
    with torch.inference_mode():
        assert torch.equal(model.generate(prompt, **GREEDY), text)


@every_system
def test_rows_that_end_early(system):
    """A finished row is padded and does not disturb the others."""
    model, prompt = make_system(system), random_ids(3, 6)
    free = model.generate(prompt, **GREEDY)
    end = int(free[1, 8])
    stopped = model.generate(prompt, eos_token_id=end, pad_token_id=0, **GREEDY)
    for row in range(3):
        until = (free[row, 6:] == end).nonzero()
        length = int(until[0]) + 7 if len(until) else free.shape[1]
        length = min(length, stopped.shape[1])
        assert torch.equal(stopped[row, :length], free[row, :length])
        assert not stopped[row, length:].any()


@every_system
def test_other_caches_are_refused(system):
    model, prompt = make_system(system), random_ids(1, 8)
    for implementation in ("static", "quantized", "offloaded", "dynamic"):
        with pytest.raises(ValueError, match="brings its own cache"):
            model.generate(prompt, max_new_tokens=4, cache_implementation=implementation)


@pytest.mark.parametrize("system", SYSTEMS)
def test_rows_selected_from_a_ragged_cache_go_on(system):
    """Down to rows that are all at one place, too."""
    model = make_system(system, torch.float64)
    prompts = [random_ids(1, length)[0] for length in (12, 5, 9)]
    ids, mask = left_padded(prompts)
    more = random_ids(1, 6)
    for rows in ([1], [2, 2], [0, 1]):
        with torch.inference_mode():
            cache = model(ids, attention_mask=mask).cache
            cache.batch_select_indices(torch.tensor(rows))
            logits = model(more.expand(len(rows), -1), cache=cache).logits
            for at, row in enumerate(rows):
                alone = model(torch.cat([prompts[row][None], more], dim=1)).logits[0, -6:]
                assert (logits[at] - alone).abs().max() <= 1e-10
