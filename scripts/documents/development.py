"""Tables and numbers from development.json, taken while the kernel was tuned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from documents.common import Entries, table


def timeline_table(record: dict[str, Any]) -> str:
    shapes = record["timeline"]["shapes"]
    steps = [step for step in shapes[0] if step not in ("heads", "batch", "rows")]
    return table(
        ("µs after the start", *(f"{s['heads']}, {s['batch'].replace('x', ' × ')}, {s['rows']} rows" for s in shapes)),
        ([step.replace("_", " "), *(f"{shape[step]:.2f}" for shape in shapes)] for step in steps),
        f"{record['device']}, commit {record['timeline']['commit']}",
    )


def low_bit_stream_table(record: dict[str, Any]) -> str:
    stream = record["low_bit_stream"]
    steps = list(stream["head_major"]["e2m3"]) + ["no_arithmetic_pairs", "no_v"]
    kinds = [(layout, fmt) for layout in ("head_major", "token_major") for fmt in ("fp8", "e2m3", "nvfp4")]
    return table(
        ("64 × 8K, µs", *(f"{fmt}, {layout.replace('_', '-')}" for layout, fmt in kinds)),
        (
            [
                step.replace("_", " "),
                *(f"{us:.0f}" if (us := stream[lay][fmt].get(step)) else "–" for lay, fmt in kinds),
            ]
            for step in steps
        ),
        f"{record['device']}, commit {stream['commit']} and, rows together, {stream['commit_rows_together']}",
    )


def trials_table(record: dict[str, Any]) -> str:
    return table(
        ("tried", "kept", "before, µs", "after, µs"),
        (
            [trial["what"], "yes" if trial["kept"] else "no", f"{trial['before']:.1f}", f"{trial['after']:.1f}"]
            for trial in record["trials"]
        ),
        f"{record['device']}, {record['date']}, while the kernel was tuned",
    )


def _side_by_side(record: dict[str, Any]) -> str:
    """Of the trial of two heads in a stage, 64 x 8K: fp8, e2m3 and nvfp4, before and after."""
    trials = [t for t in _trials(record, "neighbouring heads side", 5) if t["what"].endswith("64 x 8K")]
    return ", ".join(map(_before_and_after, trials))


def _trials(record: dict[str, Any], first: str, count: int) -> list[dict[str, Any]]:
    """Trials that follow each other, from the one whose text begins so."""
    at = next(i for i, trial in enumerate(record["trials"]) if trial["what"].startswith(first))
    return list(record["trials"][at : at + count])


def _before_and_after(trial: dict[str, Any]) -> str:
    return f"{trial['before']:.0f} to {trial['after']:.0f}"


def _whole_items(record: dict[str, Any]) -> str:
    """256 x 1K with rows that end where items end, less than without."""
    changes = [100 * (1 - t["after"] / t["before"]) for t in _trials(record, "rows over equal lengths end", 3)]
    return ", ".join(f"{heads} {change:.0f} %" for heads, change in zip(("32/8", "32/4", "64/8"), changes, strict=True))


def _feeders(record: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = record["profile"]["nvfp4_64x8K_head_major_at_ff0a9a0"]
    return found


def _feeder_gains(record: dict[str, Any]) -> str:
    """Of nvfp4, head-major, over long pieces and over short ones."""
    long, short = (100 * (1 - t["after"] / t["before"]) for t in _trials(record, "a producer of 62", 2))
    return f"{long:.0f} % over long pieces, {short:.0f} % over short ones"


def _slower_us(record: dict[str, Any]) -> float:
    """How much longer a short call took before the first tiles were kept apart."""
    trial = _trials(record, "a producer of 62", 6)[-1]
    return float(trial["after"] - trial["before"])


def _crowd(record: dict[str, Any]) -> str:
    """What six consumer warps gain, least and most."""
    gains = [100 * (1 - t["after"] / t["before"]) for t in _trials(record, "six consumer warps a half, two on", 5)]
    return f"{min(gains):.0f} to {max(gains):.0f}"


def _saved_us(trial: dict[str, Any]) -> float:
    return float(trial["before"] - trial["after"])


def _slower(trial: dict[str, Any]) -> float:
    """In percent."""
    return 100 * (float(trial["after"]) / float(trial["before"]) - 1)


def _halved(record: dict[str, Any], first: int, end: int, change: Callable[[dict[str, Any]], float]) -> list[float]:
    """Of the trials of two warps on a stage."""
    return list(map(change, _trials(record, "two warps on a stage", end)[first:]))


def _range(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _q_together_long(record: dict[str, Any]) -> str:
    """256 x 1K with Q prepared by all warps together, how much slower."""
    fp8, nvfp4 = map(_slower, _trials(record, "Q prepared by all warps", 3)[1:])
    return f"{fp8:.0f} % in fp8 and {nvfp4:.0f} % in nvfp4, head-major"


def _round_us(record: dict[str, Any]) -> float:
    """What a second round of tiles costs a short call."""
    readings = record["readings"]
    return float(readings["pairs_of_a_cluster_16_tiles"]["us"] - readings["pairs_of_a_cluster_8_tiles"]["us"])


def _clusters(record: dict[str, Any]) -> dict[str, Any]:
    return dict(record["readings"]["ctas_at_once_by_cluster_size"])


def _sm_spread(record: dict[str, Any]) -> float:
    """How much later, in percent, the slowest tenth of the TPCs ends than the fastest."""
    ends = sorted(record["sm_speed"]["tile_loop_end_us_by_tpc"])
    tenth = len(ends) // 10
    return 100 * (sum(ends[-tenth:]) / sum(ends[:tenth]) - 1)


TABLES: Entries = {
    "timeline": ("development.json", timeline_table),
    "low-bit-stream": ("development.json", low_bit_stream_table),
    "trials": ("development.json", trials_table),
}

NUMBERS: Entries = {
    "development.gpu-tests": ("development.json", lambda record: str(record["tests"]["passed"])),
    "development.side-by-side": ("development.json", _side_by_side),
    "development.shadow": (
        "development.json",
        lambda record: " and ".join(f"{error:.2e}" for error in record["shadow_checks"]["rel_errors"]),
    ),
    "development.wide": (
        "development.json",
        lambda record: _before_and_after(_trials(record, "wgmma for 64 q rows", 1)[0]),
    ),
    "development.wide-instructions": (
        "development.json",
        lambda record: f"{record['profile']['fp8_wide_64_rows_16x8K']['instructions_per_warp_and_tile']:.0f}",
    ),
    "development.aligned-wide": (
        "development.json",
        lambda record: _before_and_after(_trials(record, "rows of one piece for long lines", 1)[0]),
    ),
    "development.piece-cost": (
        "development.json",
        lambda record: _before_and_after(_trials(record, "a piece of nvfp4 counted as six", 1)[0]),
    ),
    "development.turns": (
        "development.json",
        lambda record: ", ".join(map(_before_and_after, _trials(record, "O of a tile and S of the next", 4))),
    ),
    "development.three-groups": (
        "development.json",
        lambda record: _before_and_after(_trials(record, "three warpgroups of 160 registers", 1)[0]),
    ),
    "power.mhz": ("development.json", lambda record: f"{min(m for r in record['power']['rows'] for m in r['mhz'])}"),
    "power.highest-mhz": ("development.json", lambda record: f"{record['power']['highest_mhz']}"),
    "power.wide": (
        "development.json",
        lambda record: "{us_first:.0f} and then {us:.0f}".format(**record["power"]["rows"][0]),
    ),
    "power.narrow": (
        "development.json",
        lambda record: "{us_first:.0f} and {us:.0f}".format(**record["power"]["rows"][2]),
    ),
    "development.halved-us": ("development.json", lambda record: _range(_halved(record, 0, 4, _saved_us), 1)),
    "development.halved-nvfp4": ("development.json", lambda record: _range(_halved(record, 5, 7, _slower), 0)),
    "development.q-together-long": ("development.json", _q_together_long),
    "host.run": ("development.json", lambda record: f"{record['host']['run']:.1f}"),
    "host.kernel": ("development.json", lambda record: f"{record['host']['kernel_call']:.1f}"),
    "host.plan": ("development.json", lambda record: f"{record['host']['plan_device']:.1f}"),
    "host.build": ("development.json", lambda record: f"{record['host']['build_plan_256']:.0f}"),
    "development.q-together": (
        "development.json",
        lambda record: " to ".join(
            f"{_trials(record, 'Q prepared by all warps', 1)[0][when]:.1f}" for when in ("before", "after")
        ),
    ),
    "readings.machines": (
        "development.json",
        lambda record: " and ".join(f"{us:.0f}" for us in record["readings"]["nvfp4_hnd_16x32K_by_machine"]["us"]),
    ),
    "development.whole-items": ("development.json", _whole_items),
    "development.fast-sms": ("development.json", lambda record: f"{_sm_spread(record):.0f}"),
    "nvfp4.bad-launches": (
        "development.json",
        lambda record: str(
            record["nvfp4_block_scales"]["released_with_its_loads_on_their_way"]["token_major_bad_launches"]
        ),
    ),
    "readings.d64-us": ("development.json", lambda record: f"{record['readings']['head_size_64_64x8K']['us']:.0f}"),
    "readings.round-us": ("development.json", lambda record: f"{_round_us(record):.1f}"),
    "development.crowd": ("development.json", _crowd),
    "stream.rows-of-256": (
        "development.json",
        lambda record: f"{record['low_bit_stream']['head_major']['e2m3']['no_arithmetic_rows_of_256']:.0f}",
    ),
    "rates.product-and-lop3": (
        "development.json",
        lambda record: str(record["instruction_rates"]["clocks"]["HMMA m16n8k16 and four LOP3"]),
    ),
    "feeders.producer": ("development.json", lambda record: str(_feeders(record)["of_which_producer"])),
    "feeders.copier": ("development.json", lambda record: str(_feeders(record)["of_which_copier"])),
    "feeders.all": ("development.json", lambda record: str(_feeders(record)["instructions"])),
    "feeders.busy": ("development.json", lambda record: str(_feeders(record)["copier_busy_percent"])),
    "feeders.gains": ("development.json", _feeder_gains),
    "feeders.slower": ("development.json", lambda record: f"{_slower_us(record):.1f}"),
    "pieces.beside": ("development.json", lambda record: str(_feeders(record)["of_a_piece_beside_its_tiles"])),
    "pieces.before": ("development.json", lambda record: str(_feeders(record)["of_a_piece_before_its_tiles"])),
    "pieces.tile": ("development.json", lambda record: str(_feeders(record)["of_which_a_consumers_tile"])),
    "feeders.alu": ("development.json", lambda record: f"{_feeders(record)['alu_pipe_percent']:.0f}"),
    "readings.clusters-of-4": ("development.json", lambda record: str(_clusters(record)["4"])),
    "readings.clusters-of-1": ("development.json", lambda record: str(_clusters(record)["1"])),
}
