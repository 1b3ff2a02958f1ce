"""Context files of strangers: no crash, no hang, no code, one kind of error."""

import hashlib
import json
import random
import time

import pytest
import torch
from tokenizers import Tokenizer, models

from meanbank import MeanbankCache
from meanbank.core.errors import ContextFileError
from meanbank.model.context_file import read_summary
from tests.model.test_context_files import filled, goes_on, small

SEEDS = 60
MUTATIONS = 8  # a seed, in the ordinary suite
SYSTEMS = [
    ("kvm_power_law", "mixed_bank", [21, 21]),
    ("kvm_counts", "bank", [21, 9, 0]),
    ("ovq", "bank", [14]),
    ("rwkv7", "projection", [14, 3]),
    ("full", "bank", [11, 11]),
    ("sliding_window_sink", "projection", [12]),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """For each system its model and the bytes of a file of it."""
    found = []
    for memory, source, lengths in SYSTEMS:
        model, path = small(memory, source), tmp_path_factory.mktemp("contexts") / "one.ctx"
        filled(model, lengths).save(path, model)
        found.append((model, path.read_bytes()))
    return found


class Parts:
    """A file taken apart; `signed` puts it together with all checksums right."""

    def __init__(self, data):
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        self.words = header.pop("__metadata__")
        self.entries, self.payload = header, bytearray(data[8 + length :])

    def signed(self):
        for name, entry in self.entries.items():
            start, stop = entry["data_offsets"]
            digest = hashlib.sha256(self.payload[start:stop]).hexdigest()
            if f"sha256:{name}" in self.words:
                self.words[f"sha256:{name}"] = digest
        self.words["header_sha256"] = "0" * 64
        text = json.dumps({"__metadata__": self.words, **self.entries}, separators=(",", ":"))
        return sign(text) + bytes(self.payload)


def sign(text):
    """A header with its length, padding and own checksum."""
    body = text.encode() + b" " * (-len(text) % 8)
    digest = hashlib.sha256(body).hexdigest().encode()
    mark = b'"header_sha256":"'
    at = body.find(mark) + len(mark)
    if at >= len(mark):
        body = body[:at] + digest + body[at + 64 :]
    return len(body).to_bytes(8, "little") + body


def check(model, data, path, *, refused=True):
    """Loading raises ContextFileError in one line, or (if it may) gives a cache that works."""
    path.write_bytes(data)
    started = time.monotonic()
    for read in (read_summary, lambda path: MeanbankCache.load(path, model)):
        try:
            result = read(path)
        except ContextFileError as error:
            assert "\n" not in str(error)
            assert str(path) in str(error)
            assert len(str(error)) < 1000
        else:
            if isinstance(result, MeanbankCache):
                assert not refused, "a damaged file was loaded"
                goes_on(model, result, torch.zeros(len(result.lengths), 5, dtype=torch.long))
    assert time.monotonic() - started < 10


def damaged(data, generator):
    """The file with something done to it that its checksums do not know about."""
    data, header = bytearray(data), 8 + int.from_bytes(data[:8], "little")
    places = {"header": (0, header), "payload": (header, len(data)), "any": (0, len(data))}
    kind = generator.choice(["flip", "flip", "flips", "cut", "swap", "grow", "zero", "length"])
    low, high = places[generator.choice(list(places))]
    at, other = generator.randrange(low, high), generator.randrange(low, high)
    if kind == "flip":
        data[at] ^= 1 << generator.randrange(8)
    elif kind == "flips":
        for _ in range(generator.randrange(2, 30)):
            data[generator.randrange(low, high)] = generator.randrange(256)
    elif kind == "cut":
        del data[at:]
    elif kind == "swap":
        low, high = sorted((at, other))
        data[low:high] = data[low:high][::-1]
    elif kind == "grow":
        data[at:at] = generator.randbytes(generator.randrange(1, 40))
    elif kind == "zero":
        data[at : at + 16] = bytes(len(data[at : at + 16]))
    else:
        data[:8] = generator.choice([0, 8, 2**31, 2**63, 2**64 - 1, header]).to_bytes(8, "little")
    return bytes(data)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_damage_is_noticed(seed, saved, tmp_path):
    check_damage(seed, MUTATIONS, saved, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS, 2 * SEEDS))
def test_much_damage_is_noticed(seed, saved, tmp_path):
    check_damage(seed, 20_000 // SEEDS + 1, saved, tmp_path)


def check_damage(seed, times, saved, tmp_path):
    """Half of it is done to files whose checksums are right again afterwards."""
    generator = random.Random(seed)
    for number in range(times):
        model, data = saved[(seed + number) % len(saved)]
        if number % 2:
            check(model, forged(data, generator), tmp_path / "one.ctx", refused=False)
        else:
            changed = damaged(data, generator)
            check(model, changed, tmp_path / "one.ctx", refused=changed != data)


def forged(data, generator):
    """A file with something changed on purpose: all checksums are right."""
    parts = Parts(data)
    name, other = generator.sample(list(parts.entries), 2)
    entry = parts.entries[name]
    word = generator.choice([word for word in parts.words if not word.startswith("sha256:")])
    numbers = [0, 1, -1, 7, 2**31, 2**53, 10**15, 10**30]
    kind = generator.choice(["dtype", "shape", "offset", "swap", "word", "words", "drop", "bytes"])
    if kind == "dtype":
        entry["dtype"] = generator.choice(["F64", "F32", "BF16", "F16", "I32", "I64", "U8", "X"])
    elif kind == "shape":
        shape = entry["shape"]
        shape[generator.randrange(len(shape))] = generator.choice(numbers)
    elif kind == "offset":
        entry["data_offsets"][generator.randrange(2)] += generator.choice([-4, 4, 10**9])
    elif kind == "swap":
        parts.entries[name], parts.entries[other] = parts.entries[other], entry
    elif kind == "word":
        states = ["RowStates", "FullState", "KVMRows", "BlockState", "(2)", "(900000)", "[[0],[1]]"]
        parts.words[word] = generator.choice([*states, *map(str, numbers), "null", "[1,2]", "os"])
    elif kind == "words":
        second = generator.choice(list(parts.words))
        parts.words[word], parts.words[second] = parts.words[second], parts.words[word]
    elif kind == "drop":
        parts.words.pop(word) if generator.random() < 0.5 else parts.entries.pop(name)
    else:
        start = generator.randrange(len(parts.payload) // 4) * 4
        parts.payload[start : start + 4] = generator.randbytes(4)
    return parts.signed()


def test_every_bit_counts(tmp_path):
    """A thousand of them, evenly spread over header and payload."""
    model, path = small("sliding_window", "bank"), tmp_path / "one.ctx"
    filled(model, [3]).save(path, model)
    data = path.read_bytes()
    step = len(data) * 8 // 1000 | 1  # odd, so that all bits of a byte have their turn
    for bit in range(0, len(data) * 8, step):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        check(model, bytes(changed), path)


def change(parts, name, **settings):
    parts.entries[name].update(settings)


def numbers(parts, name, dtype=torch.float32):
    start, stop = parts.entries[name]["data_offsets"]
    return torch.frombuffer(parts.payload, dtype=dtype)[start // 4 : stop // 4]


KEY, ROWS = "layers.1.attention.memory.memory.window_key", "layers.1.attention.memory.memory.rows"
VALUES, MEMORY = "layers.1.attention.memory.values", "state:layers.1.attention.memory.memory"


def set_word(name, word):
    return lambda parts: parts.words.update({name: word})


def fewer_rows(parts):
    """As if there were a row less, consistently."""
    for part in ("key", "value", "scale"):
        entry = parts.entries[f"{ROWS}.{part}"]
        entry["shape"][2] -= 1
    repack(parts)


def repack(parts):
    payload, at = bytearray(), 0
    for entry in parts.entries.values():
        size = {"F32": 4, "I32": 4, "F64": 8, "BF16": 2}[entry["dtype"]]
        for length in entry["shape"]:
            size *= length
        start = entry["data_offsets"][0]
        payload += parts.payload[start : start + size].ljust(size, b"\0")
        entry["data_offsets"] = [at, at + size]
        at += size
    parts.payload = payload


def wider(parts):
    change(parts, KEY, dtype="F64")
    repack(parts)


def one_more_tensor(parts):
    size = len(parts.payload)
    parts.entries["layers.9"] = {"dtype": "F32", "shape": [1], "data_offsets": [size, size + 4]}
    parts.words["sha256:layers.9"] = ""
    parts.payload += bytes(4)


def without_a_tensor(parts):
    last = list(parts.entries)[-1]
    entry = parts.entries.pop(last)
    del parts.words[f"sha256:{last}"], parts.payload[entry["data_offsets"][0] :]


def other_rows(parts):
    parts.words[f"state:{ROWS}"] = "OVQRows"
    for names, prefix in ((parts.entries, ""), (parts.words, "sha256:")):
        names[f"{prefix}{ROWS}.count"] = names.pop(f"{prefix}{ROWS}.scale")
    parts.entries = dict(sorted(parts.entries.items(), key=lambda item: item[1]["data_offsets"]))


def no_class(parts):
    parts.words[MEMORY] = "subprocess.Popen"


FORGERIES = {
    "of dtype 'I64'": lambda parts: change(parts, KEY, dtype="I64"),
    "the model in torch.float32": wider,
    "window_key must have shape": lambda parts: change(parts, KEY, shape=[2, 2, 8, 5]),
    "must not be of torch.float32": lambda parts: change(parts, VALUES, dtype="F32"),
    "key must have shape": fewer_rows,
    "not finite": lambda parts: numbers(parts, KEY).fill_(float("nan")),
    "are not finite": lambda parts: numbers(parts, ROWS + ".scale")[:1].fill_(float("inf")),
    "scale must be at least 0": lambda parts: numbers(parts, ROWS + ".scale").fill_(-1.0),
    "outside the vocabulary": lambda parts: numbers(parts, VALUES, torch.int32).fill_(40),
    "negative integers": lambda parts: numbers(parts, VALUES, torch.int32).fill_(-1),
    "belongs to no state": one_more_tensor,
    "is missing": without_a_tensor,
    "seen must be 21, got 22": set_word(MEMORY + ".seen", "22"),
    "expected KVMRows, got OVQRows": other_rows,
    "is no value of a state": no_class,
    "has version '2'": set_word("version", "2"),
    "not a context": set_word("format", "something else"),
    "how many tokens": set_word("lengths", "[]"),
    "cannot hold": set_word("lengths", "[21,22]"),
    "different places": set_word("lengths", "[21,20]"),
    "another model": set_word("model", "0" * 64),
    "another tokenizer": set_word("tokenizer", "0" * 64),
    "a model in float64": set_word("dtype", "float64"),
}


@pytest.mark.parametrize("message", FORGERIES)
def test_forgeries_are_told_apart(message, tmp_path):
    model, path = small("kvm_power_law", "bank"), tmp_path / "one.ctx"
    tokenizer = Tokenizer(models.BPE())
    filled(model, [21, 21]).save(path, model, tokenizer=tokenizer)
    parts = Parts(path.read_bytes())
    assert parts.signed() == path.read_bytes()
    FORGERIES[message](parts)
    path.write_bytes(parts.signed())
    with pytest.raises(ContextFileError, match=message):
        MeanbankCache.load(path, model, tokenizer=tokenizer)


def nested(depth):
    return sign('{"__metadata__":' + "[" * depth + "]" * depth + "}")


def test_headers_that_are_no_headers(saved, tmp_path):
    model, data = saved[0]
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].decode()
    empty = '{"__metadata__":{"format":"meanbank context","version":"1","header_sha256":"%s"}}'
    rows = ",".join(f'"{i}":""' for i in range(300_000))
    long = "x" * 2**21
    wrong = {
        "empty": b"",
        "seven bytes": bytes(7),
        "no header": bytes(8),
        "huge length": (2**62).to_bytes(8, "little") + data[8:],
        "large header": (2**25 + 8).to_bytes(8, "little") + bytes(2**25 + 8),
        "deep": nested(100_000),
        "very deep": nested(4_000_000),
        "no checksum": sign('{"__metadata__":{"format":"meanbank context"}}'),
        "no tensors": sign(empty % ("0" * 64)),
        "many words": sign('{"__metadata__":{' + rows + "}}"),
        "long word": sign('{"__metadata__":{"header_sha256":"' + "0" * 64 + f'","a":"{long}"}}}}'),
        "escapes": sign(text.replace("meanbank context", "meanbank\\u0020context")) + data[-100:],
        "spaces": sign(text.replace(":", ": ")) + data[8 + length :],
        "duplicate word": sign(text.replace('"version":"1"', '"version":"1","version":"1"'))
        + data[8 + length :],
        "duplicate tensor": sign(text[: text.rindex("}")] + "," + text[text.rindex('"layers') :])
        + data[8 + length :],
        "not ours": sign('{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}') + bytes(4),
        "pickle": b"\x80\x04cos\nsystem\n(S'false'\ntR.",
        "zip": b"PK\x03\x04" + bytes(100),
    }
    for name, changed in wrong.items():
        started = time.monotonic()
        check(model, changed, tmp_path / "one.ctx")
        assert time.monotonic() - started < 3, name
    path = tmp_path / "one.ctx"
    for kind in ("word", "tensor"):
        path.write_bytes(wrong[f"duplicate {kind}"])
        with pytest.raises(ContextFileError, match="twice"):
            MeanbankCache.load(path, model)
