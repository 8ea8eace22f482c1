"""Machines as the plan knows them: makers' data sheets, rounded down to what a program gets. Users may add their own.

Rates are of one GPU, in one direction, in bytes or floating-point operations a second; FLOP/s are dense ones. What a
program reaches of them is the business of `times.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from beam_rl.errors import InputError

GB, TB, GIB = 10**9, 10**12, 2**30


@dataclass(frozen=True)
class Hardware:
    """One GPU, and its share of a node's host."""

    name: str
    hbm_bytes: int  # as the driver tells a program
    hbm_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float  # MXFP8's rate where there is one, else that of BF16: it is emulated there
    nvlink_bytes_per_s: float  # to another GPU of the node (of the rack, for NVL72)
    network_bytes_per_s: float  # to a GPU of another node
    pcie_bytes_per_s: float  # to its host
    gpus_per_node: int
    host_bytes: int  # of a node
    nvme_bytes: int  # of a node's drives together
    nvme_bytes_per_s: float  # of a node's drives together, reading and writing at once


# B200, H200, H100: DGX/HGX of 8 with a ConnectX-7 (400 Gb/s) a GPU. GB300: a compute tray of an NVL72 rack, 4 GPUs with
# a ConnectX-8 (800 Gb/s) each, the host behind NVLink-C2C. Host memory and drives are what such nodes usually have.
TABLE = {
    hardware.name: hardware
    for hardware in (
        Hardware("H100", 79 * GIB, 3.35e12, 989e12, 989e12, 450e9, 50e9, 55e9, 8, 2 * TB, 30 * TB, 20e9),
        Hardware("H200", 139 * GIB, 4.8e12, 989e12, 989e12, 450e9, 50e9, 55e9, 8, 2 * TB, 30 * TB, 20e9),
        Hardware("B200", 178 * GIB, 7.7e12, 2.25e15, 4.5e15, 900e9, 50e9, 55e9, 8, 2 * TB, 30 * TB, 20e9),
        Hardware("GB300", 276 * GIB, 8.0e12, 2.5e15, 5.0e15, 900e9, 100e9, 450e9, 4, 960 * GB, 15 * TB, 20e9),
    )
}


def read_table(file: str | None) -> dict[str, Hardware]:
    """The built-in table, with the machines of a YAML file added or changed.

    The file maps a name to fields of `Hardware`; `like: H200` takes the fields that it leaves out from there.
    Raises:
        InputError: the file can't be read, or a field is unknown, missing or no positive number.
    """
    table = dict(TABLE)
    if file is None:
        return table
    try:
        tree = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cluster.hardware = {file}: can't be read: {' '.join(str(error).split())}") from None
    if not isinstance(tree, Mapping):
        raise InputError(f"cluster.hardware = {file}: a mapping of names to machines is expected")
    for name, given in tree.items():
        table[str(name)] = _entry(file, str(name), given, table)
    return table


def _entry(file: str, name: str, given: Any, table: Mapping[str, Hardware]) -> Hardware:
    where = f"cluster.hardware = {file}: {name}"
    if not isinstance(given, Mapping):
        raise InputError(f"{where}: a mapping of fields to numbers is expected")
    values = dict(given)
    like = values.pop("like", name)
    kinds = {field.name: field.type for field in fields(Hardware) if field.name != "name"}
    base = {key: getattr(table[like], key) for key in kinds} if like in table else {}
    for key, value in values.items():
        if key not in kinds:
            raise InputError(f"{where}: unknown field {key}; known: like, {', '.join(kinds)}")
        try:
            number = float(value)  # YAML reads 1e12 as a text
        except (TypeError, ValueError):
            number = 0.0
        if not number > 0:
            raise InputError(f"{where}: {key} = {value}: a positive number is expected")
        base[key] = int(number) if kinds[key] is int else number
    missing = [key for key in kinds if key not in base]
    if missing:
        raise InputError(f"{where}: lacks {', '.join(missing)}; like: {next(iter(table))} would fill them in")
    return Hardware(name, **base)


def find(name: str, file: str | None) -> Hardware:
    """The machine that a recipe's `cluster.gpu` names. InputError if there is none of this name."""
    table = read_table(file)
    known = {key.lower(): hardware for key, hardware in table.items()}
    if name.lower() not in known:
        raise InputError(
            f"cluster.gpu = {name}: is none of {', '.join(table)}; describe it in a YAML file that cluster.hardware names"
        )
    return known[name.lower()]
