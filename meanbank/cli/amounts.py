"""Amounts on the command line: tokens such as 128K, bytes such as 24GB."""

import re

TOKENS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
BYTES = {"": 1, "B": 1}
BYTES |= {f"{unit}B": 1000**power for power, unit in enumerate("KMGT", start=1)}
BYTES |= {f"{unit}IB": 1024**power for power, unit in enumerate("KMGT", start=1)}


def tokens_of(name: str, text: str) -> int:
    """Tokens: 4096, 128K (1,024 each), 1M (1,048,576). ValueError for anything else."""
    return _amount(name, text, TOKENS, "a positive number of tokens such as 4096, 128K or 1M")


def bytes_of(name: str, text: str) -> int:
    """Bytes: 24GB (10^9 each), 24GiB (2^30), 500MB. ValueError for anything else."""
    return _amount(name, text, BYTES, "a positive number of bytes such as 24GB, 24GiB or 500MB")


def told(count: int) -> str:
    """Bytes in short, in powers of 1,000: three digits and a unit."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    digits = 0 if units[0] == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {units[0]}"


def _amount(name: str, text: str, units: dict[str, int], wanted: str) -> int:
    match = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match and match[2].upper() in units:
        amount = float(re.sub("[_,]", "", match[1])) * units[match[2].upper()]
        if 1 <= amount <= 2**62:
            return round(amount)
    raise ValueError(f"{name} must be {wanted}, got {text!r}")
