"""The tokenizer: exact round trip, bytes per token, determinism, named tokenizers."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from meanbank.data.encoder import encode_texts
from meanbank.data.tokenizer import (
    END_OF_TEXT,
    end_of_text_id,
    load_tokenizer,
    token_bytes,
    tokenizer_digest,
    train_tokenizer,
)

TEXTS = ["the memory keeps a mean of keys\n", "def f(x):\n    return x\n", "naïve 東京 🙂"] * 5
TOKENIZER = train_tokenizer(TEXTS, 300)
TOKEN_BYTES = token_bytes(TOKENIZER)


@given(
    st.text(max_size=60) | st.lists(st.sampled_from(["the", " ", "\n", END_OF_TEXT])).map("".join)
)
def test_round_trip_is_exact_and_bytes_add_up(text: str):
    ids = encode_texts(TOKENIZER, [text])[0]
    assert TOKENIZER.decode(ids) == text
    assert TOKEN_BYTES[ids].sum() == len(text.encode("utf-8"))
    assert end_of_text_id(TOKENIZER) not in ids


def test_end_of_text_has_id_zero_and_no_bytes():
    assert end_of_text_id(TOKENIZER) == 0
    assert TOKEN_BYTES[0] == 0
    assert (TOKEN_BYTES[1:] > 0).all()
    assert TOKEN_BYTES.shape == (TOKENIZER.get_vocab_size(),)


@settings(max_examples=5)
@given(st.integers(257, 400))
def test_training_is_deterministic(vocab_size: int):
    once, again = (train_tokenizer(TEXTS, vocab_size).to_str() for _ in range(2))
    assert once == again
    assert len(token_bytes(train_tokenizer(TEXTS, vocab_size))) <= vocab_size


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ValueError, match="at least 257"):
        train_tokenizer(TEXTS, 256)


def test_save_and_load_by_file_and_folder(tmp_path: Path):
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.to_str() == TOKENIZER.to_str()
        text = f"a {END_OF_TEXT} b"
        assert encode_texts(loaded, [text]) == encode_texts(TOKENIZER, [text])


def test_stored_truncation_and_padding_are_switched_off(tmp_path: Path):
    other = Tokenizer.from_str(TOKENIZER.to_str())
    other.enable_truncation(4)
    other.enable_padding(length=4)
    other.save(str(tmp_path / "tokenizer.json"))
    texts = ["a", "the memory keeps a mean of keys, 123456789"]
    assert encode_texts(load_tokenizer(tmp_path), texts) == encode_texts(TOKENIZER, texts)


def test_added_tokens_that_are_not_special_count_their_bytes():
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.add_tokens(["naïve!"])
    assert token_bytes(tokenizer)[tokenizer.token_to_id("naïve!")] == len("naïve!".encode())


def test_a_byte_level_step_inside_a_sequence_is_found():
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert (token_bytes(tokenizer) == TOKEN_BYTES).all()


def test_other_tokenizers_are_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match="byte-level BPE only, this is a WordLevel"):
        token_bytes(tokenizer)
    with pytest.raises(ValueError, match="no end-of-text token"):
        end_of_text_id(tokenizer)


def test_missing_and_malformed_files(tmp_path: Path):
    with pytest.raises(ValueError, match="no tokenizer at"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_the_hub_comes_from_its_cache(hub: Path):
    loaded = load_tokenizer("hf:some/one")
    assert len(token_bytes(loaded)) == 260
    assert tokenizer_digest("hf:some/one") == tokenizer_digest("hf:some/one")
    assert encode_texts(loaded, [END_OF_TEXT]) != [[end_of_text_id(loaded)]]


@pytest.mark.parametrize("name", ["some/other", "not a name", "a/b/c"])
def test_a_tokenizer_that_the_hub_does_not_give_is_one_line(hub: Path, name: str):
    with pytest.raises(ValueError, match="from the Hugging Face hub") as caught:
        load_tokenizer(f"hf:{name}")
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)
