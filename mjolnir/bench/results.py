"""Rows and reports of a bench run: typed, checked when read, one row a line in JSON. Imports neither torch nor NumPy,
so that documents can be made from committed results anywhere."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

METHOD = (
    "us: median over graph replays of the time per call, inside a CUDA graph of many calls that rotate over different "
    "caches (more than 240 MB of KV between two uses of one, so L2 is cold), merge of splits included; us_p10 and "
    "us_p90: deciles. Pages in random order; Q normal in bf16; K and V normal values in the KV format, or (data hard) "
    "bytes over all finite e4m3 codes. kv_bytes: K and V of live tokens; floor_us = kv_bytes / roofline; target_us = "
    "1.04 * floor_us + 4; ratio = us / target_us; tb_s = kv_bytes / us. rel_err: largest over the sequences "
    "rel_err_seqs (shortest and longest) of |O - oracle| / |oracle| in the 2-norm, oracle in fp64 over the exact cache "
    "values, O from a replay whose outputs were NaN before it; all other outputs were finite. host_us: median host "
    "time of an eager run(); plan_us: of a plan() from host lengths. peers: us of other kernels over the same caches, "
    "by the same method (half the replays) in the same run, after ours; null where there is none, and peer_notes says "
    "why. Where a peer takes Q in fp8, rounding it is not timed. peer_rel_err: their rel_err, on which no time depends."
    " fixed_split: tokens per split in batch-invariant mode, 0 where splits follow from balance."
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One shape, measured; times in µs. METHOD says what each number is.

    Raises:
        TypeError, ValueError: a field of another type, or a number that no measurement can give.
    """

    name: str
    heads_q: int
    heads_kv: int
    head_dim: int
    page_size: int
    layout: str
    kv_format: str
    q_len: int
    data: str
    fixed_split: int
    batch: str
    lens: list[int]
    us: float
    us_p10: float
    us_p90: float
    kv_bytes: int
    floor_us: float
    target_us: float
    ratio: float
    tb_s: float
    rel_err: float
    rel_err_seqs: list[int]
    host_us: float
    plan_us: float
    caches: int
    calls: int
    replays: int
    peers: dict[str, float | None]
    peer_rel_err: dict[str, float]
    peer_notes: dict[str, str]

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Row).items():
            value = getattr(self, name)
            if not _fits(value, kind):
                raise TypeError(f"{name} must be {kind}, got {value!r}")
            if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        if not 0 < self.us_p10 <= self.us <= self.us_p90:
            raise ValueError(f"us_p10, us and us_p90 must ascend from above 0, got {self.us_p10, self.us, self.us_p90}")
        if missing := [name for name, us in self.peers.items() if (us is None) != (name in self.peer_notes)]:
            raise ValueError(f"peer_notes must say why there is no time, and only then: {', '.join(missing)}")
        if not math.isclose(self.ratio, self.us / self.target_us, rel_tol=1e-2):
            raise ValueError(f"ratio must be us / target_us = {self.us / self.target_us:.4f}, got {self.ratio}")


@dataclasses.dataclass(frozen=True)
class Failure:
    """A shape that gave no time, or a peer that did not."""

    name: str
    peer: str
    error: str


@dataclasses.dataclass(frozen=True)
class Report:
    """A run, as ``mjolnir bench --json`` writes it.

    Attributes:
        header: commit, device, driver, versions.
        options: suite, patterns and knobs of the run.
        skipped: names of shapes that the budget left no time for.
    """

    header: dict[str, Any]
    options: dict[str, Any]
    roofline_tb_s: float
    rows: list[Row]
    failures: list[Failure]
    skipped: list[str]
    seconds: float
    method: str = METHOD

    def to_json(self) -> str:
        from mjolnir.bench.gates import gates  # of rows, which are defined here

        top = {
            **self.header,
            "method": self.method,
            "roofline_tb_s": self.roofline_tb_s,
            "options": self.options,
            "seconds": round(self.seconds, 1),
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
            "skipped": self.skipped,
            "gates": [dataclasses.asdict(gate) for gate in gates(self.rows)],
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in top.items()]
        rows = ",\n".join(f"  {json.dumps(dataclasses.asdict(row), ensure_ascii=False)}" for row in self.rows)
        return "{\n" + ",\n".join(lines) + ',\n"rows": [\n' + rows + "\n]\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: not a report; a row with a field too many, too few or of another type.
        """
        top = json.loads(text)
        top.pop("gates")  # they follow from the rows
        own = {key: top.pop(key) for key in ("roofline_tb_s", "options", "skipped", "seconds", "method")}
        rows = [Row(**row) for row in top.pop("rows")]
        failures = [Failure(**failure) for failure in top.pop("failures")]
        return cls(header=top, rows=rows, failures=failures, **own)

    @classmethod
    def load(cls, path: Path) -> Report:
        return cls.from_json(path.read_text(encoding="utf-8"))


def geometric_mean(values: list[float]) -> float:
    """exp of the mean of the logarithms; all values are positive.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("values must not be empty")
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of the annotated type: no bool for int, no int for str."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            isinstance(key, str) and _fits(value[key], arguments[1]) for key in value
        )
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and not isinstance(value, bool)
