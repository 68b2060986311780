"""From the options of ``mjolnir bench`` to a report."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mjolnir.bench import measure, peers
from mjolnir.bench.ours import Knobs, Mjolnir
from mjolnir.bench.results import Failure, Report, Row
from mjolnir.bench.shapes import DATA, HARD, ROOFLINE_TB_S, Shape
from mjolnir.bench.suites import select, shard, suite
from mjolnir.checks import check_choice
from mjolnir.evidence import header


@dataclasses.dataclass(frozen=True)
class Options:
    """What ``mjolnir bench`` is asked for.

    Attributes:
        suite: name of a suite.
        patterns: shell-style, matched anywhere in a shape's name; none: every shape.
        data: "normal" or "hard" instead of what the suite says.
        repeat: graphs captured and timed per shape; the median is over the replays of all.
        budget_s: seconds after which no further shape is started.
        knobs: arguments of ``DecodeRunner`` that differ from its own choice.
        shard: "i/n": every n-th shape from the i-th on.
        peers: names of the peers to time too.
    """

    suite: str = "core"
    patterns: tuple[str, ...] = ()
    data: str | None = None
    repeat: int = 1
    budget_s: float = 600.0
    knobs: Knobs = dataclasses.field(default_factory=Knobs)
    shard: str = "1/1"
    peers: tuple[str, ...] = ()

    def shapes(self) -> list[Shape]:
        """The suite's shapes that the options leave, each once, in its order.

        Raises:
            ValueError: an unknown suite or kind of data, a pattern without a match, or no such shard.
        """
        shapes = suite(self.suite)
        if self.data is not None:
            check_choice("data", self.data, DATA)
            # Hard data is bytes of an fp8 cache: other formats have no such shape.
            fitting = [shape for shape in shapes if self.data != HARD or shape.kv_format == "fp8"]
            shapes = list(dict.fromkeys(dataclasses.replace(shape, data=self.data) for shape in fitting))
        return shard(select(shapes, self.patterns), self.shard)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"patterns": list(self.patterns), "peers": list(self.peers)}


def run_bench(
    options: Options,
    progress: Callable[[Row | Failure], None] = lambda _: None,
    *,
    peers_folder: Path | None = None,
    json_path: Path | None = None,
    skip_done: bool = False,
) -> Report:
    """Measure on the current CUDA device.

    Args:
        options: what to measure.
        progress: told of every row and failure.
        peers_folder: where ``options.peers`` lie.
        json_path: the report, written again after every measurement: a run that is cut keeps its rows.
        skip_done: keep the rows of an earlier report at ``json_path``, and measure only what it lacks.

    Raises:
        ValueError: there is no CUDA device, an option is out of its range, or the earlier report is of other code,
            of another device, or with other knobs.
        FileNotFoundError: ``peers_folder`` lacks a file.
    """
    start = time.monotonic()
    shapes = options.shapes()
    if options.peers and peers_folder is None:
        raise ValueError(f"--peer needs --peers DIR, the folder that has {', '.join(options.peers)}")
    if skip_done and json_path is None:
        raise ValueError("--skip-done needs --json FILE, the file whose rows it keeps")
    if not torch.cuda.is_available():
        raise ValueError("bench needs a CUDA device, and torch.cuda.is_available() is False: see `mjolnir doctor`")
    device = torch.device("cuda", torch.cuda.current_device())
    top = header(device)
    earlier = Report.load(json_path) if skip_done and json_path is not None and json_path.exists() else None
    kept = [] if earlier is None else done(earlier, top, options)
    before_s = 0.0 if earlier is None else earlier.seconds
    names = {row.name for row in kept}
    todo = [shape for shape in shapes if shape.name not in names]

    def report(outcome: measure.Outcome) -> Report:
        return Report(
            header=top,
            options=options.as_json(),
            roofline_tb_s=ROOFLINE_TB_S,
            rows=in_order(options.suite, [*kept, *outcome.rows]),
            failures=outcome.failures,
            skipped=outcome.skipped,
            seconds=before_s + time.monotonic() - start,
        )

    def save(outcome: measure.Outcome) -> None:
        if json_path is not None:
            write(json_path, report(outcome))

    loaded = [] if peers_folder is None else peers.load(peers_folder, todo, options.peers)
    outcome = measure.run(
        todo,
        device,
        ours=Mjolnir(options.knobs),
        peers=loaded,
        repeat=options.repeat,
        budget_s=options.budget_s - (time.monotonic() - start),
        progress=progress,
        save=save,
    )
    return report(outcome)


def done(earlier: Report, top: dict[str, Any], options: Options) -> list[Row]:
    """The rows of an earlier report that need not be measured again: they have all the peers.

    Raises:
        ValueError: it is of other code, of another device, or with other knobs.
    """
    for what, old, new in (
        ("source", earlier.header.get("source"), top["source"]),
        ("device", earlier.header.get("device"), top["device"]),
        ("knobs", earlier.options.get("knobs"), options.as_json()["knobs"]),
    ):
        if old != new:
            raise ValueError(f"skip_done must go on with a report of {what} {new!r}, got one of {old!r}")
    return [row for row in earlier.rows if set(options.peers) <= set(row.peers)]


def in_order(name: str, rows: Sequence[Row]) -> list[Row]:
    """Rows in the suite's order; others, such as those of other data, last."""
    place = {shape.name: i for i, shape in enumerate(suite(name))}
    return sorted(rows, key=lambda row: place.get(row.name, len(place)))


def write(path: Path, report: Report) -> None:
    """Replace the file at once: whoever reads it, or ends this process, finds a whole report."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(report.to_json(), encoding="utf-8")
    os.replace(partial, path)
