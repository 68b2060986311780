"""Calibration: the observer, the scales file and its refusals, and what a runner gets of it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import invoke
from test_demo import needs_model

import mjolnir
from mjolnir.calibration.calibrate import observe_dump
from mjolnir.calibration.observe import AmaxObserver
from mjolnir.calibration.scales import KvScales, full_scale
from mjolnir.calibration.scales_file import ScalesFile
from mjolnir.formats import FORMATS, get_format
from mjolnir.reference import decode_attention_oracle

HEADS, D, LAYERS = 2, 64, 3


def activations(seed: int = 0, tokens: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V with outlier channels, as bf16."""
    gen = torch.Generator().manual_seed(seed)
    spread = torch.exp(torch.randn(2, 1, HEADS, D, generator=gen) * 1.5)
    key, value = (torch.randn(2, tokens, HEADS, D, generator=gen) * spread).bfloat16()
    return key, value


@pytest.fixture
def observer() -> AmaxObserver:
    observer = AmaxObserver()
    for layer in range(LAYERS):
        observer.observe(layer, *activations(layer))
    return observer


def test_observed_maxima_are_those_of_everything_observed(observer: AmaxObserver) -> None:
    key, value = activations(7)
    observer.observe(1, key, value)
    both = [torch.cat(pair).float().numpy() for pair in zip(activations(1), (key, value), strict=True)]
    for got, want in zip(observer.amax(1), both, strict=True):
        np.testing.assert_array_equal(got.numpy(), np.abs(want).max(0))
    assert observer.tokens == {0: 40, 1: 80, 2: 40}


def test_the_observer_refuses() -> None:
    observer = AmaxObserver()
    key, value = activations()
    with pytest.raises(ValueError, match="layer 0 was never observed"):
        observer.amax(0)
    with pytest.raises(ValueError, match="value must have shape"):
        observer.observe(0, key, value[:, :1])
    observer.observe(0, key, value)
    with pytest.raises(ValueError, match="key of layer 0 must have shape"):
        observer.observe(0, key[:, :1], value[:, :1])
    with pytest.raises(TypeError, match=r"key must be a torch.Tensor, got list"):
        observer.observe(0, [1], [2])
    with pytest.raises(TypeError, match=r"value must be a torch.Tensor, got list"):
        observer.observe(0, key, [2])
    with pytest.raises(TypeError, match="value must have dtype .*, got torch.float8_e4m3fn"):
        observer.observe(0, key, value.to(torch.float8_e4m3fn))
    with pytest.raises(TypeError, match="layer must be an integer, got '0'"):
        observer.observe("0", key, value)
    with pytest.raises(ValueError, match="layer must be at least 0, got -1"):
        observer.observe(-1, key, value)
    key[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="key of layer 5 has values that are not finite"):
        observer.observe(5, key, value)


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_file_survives_being_written(observer: AmaxObserver, per_channel: bool, tmp_path: Path) -> None:
    file = ScalesFile.of(observer, per_channel=per_channel, headroom=1.25, model="m", source="ünïcode")
    path = tmp_path / "new" / "scales.json"
    file.save(path)
    assert ScalesFile.load(path) == file
    assert file.tokens == 40 and sorted(file.layers) == [0, 1, 2]
    amax = observer.amax(2)[1]
    assert file.layers[2].v_amax == (amax if per_channel else amax.amax(-1)).tolist()


def saved(observer: AmaxObserver, tmp_path: Path, change=lambda file: None) -> Path:
    path = tmp_path / "scales.json"
    ScalesFile.of(observer).save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def load(path: Path, **changes) -> KvScales:
    shape = dict(num_layers=LAYERS, num_heads=6, num_kv_heads=HEADS, head_size=D)
    return KvScales.load(path, **(shape | changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.pop("layers"), "layers: Field required"),
        (lambda f: f.update(layers={}), "layers must not be empty"),
        (lambda f: f.update(version=2), "version: Input should be 1"),
        (lambda f: f.update(version="1"), "version: Input should be 1"),
        (lambda f: f.pop("version"), "version: Field required"),
        (lambda f: f.pop("kind"), "kind: Field required"),
        (lambda f: f.update(tokens=1.0), "tokens: Input should be a valid integer"),
        (lambda f: f.update(head_size="64"), "head_size: Input should be a valid integer"),
        (lambda f: f.update(headroom="1"), "headroom: Input should be a valid number"),
        (lambda f: f.update(headroom=True), "headroom: Input should be a valid number"),
        (lambda f: f.update(headroom=1e300), "headroom: Input should be less than or equal to 3402823466385288"),
        (lambda f: f["layers"].update({"00": f["layers"]["0"]}), r"layers\.00\..*: Input should be a valid integer"),
        (lambda f: f["layers"].update({"-1": f["layers"]["0"]}), r"layers\.-1\."),
        (lambda f: f["layers"]["0"].update(v_amax=[1.0, 1e39]), r"layers\.0\.v_amax.*less than or equal to 3402823"),
        (lambda f: f["layers"]["0"].update(v_amax=[1.0, float("nan")]), r"layers\.0\.v_amax"),
        (lambda f: f["layers"]["0"].update(v_amax=[1.0, True]), r"layers\.0\.v_amax.*Input should be a valid number"),
        (lambda f: f.update(kind="other"), "kind: Input should be 'mjolnir-kv-scales'"),
        (lambda f: f.update(colour="blue"), "colour: Extra inputs are not permitted"),
        (lambda f: f["layers"].pop("1"), "has no layer 1; it has 0 … 2"),
        (lambda f: f["layers"]["1"].pop("v_amax"), "layers.1.v_amax: Field required"),
        (
            lambda f: f["layers"]["2"]["k_amax"].pop(),
            r"layer 2: k_amax must have shape \(2,\) or \(2, 64\), got \(1, 64",
        ),
        (lambda f: f["layers"]["2"]["k_amax"][0].pop(), "layer 2: k_amax must have shape .* rows of unequal length"),
        (lambda f: f["layers"]["0"].update(v_amax=[1.0, -1.0]), "greater than or equal to 0"),
        (lambda f: f["layers"]["0"].update(v_amax=[1.0, "x"]), "layers.0.v_amax"),
        (lambda f: f.update(headroom=0), "headroom: Input should be greater than 0"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(observer, tmp_path, change, message) -> None:
    path = saved(observer, tmp_path, change)
    with pytest.raises(ValueError, match=message) as refusal:
        load(path)
    assert "scales.json" in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"\xff", "'utf-8' codec can't decode"),
        (b"[" * 100_000, "recursion"),
        (b"[]", "the file: Input should be a valid dictionary"),
        (b'{"tokens": 1, "tokens": 2}', "'tokens' is there twice"),
        (b'{"layers": {"0": {}, "0": {}}}', "'0' is there twice"),
    ],
)
def test_files_that_are_no_such_json_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "scales.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"scales.json is not a scales file: .*{message}"):
        ScalesFile.load(path)


def test_a_model_of_another_shape_is_refused(observer: AmaxObserver, tmp_path: Path) -> None:
    path = saved(observer, tmp_path)
    with pytest.raises(ValueError, match="has no layer 3, 4; it has 0 … 2"):
        load(path, num_layers=5)
    with pytest.raises(ValueError, match="head_size is 64, the model has 128"):
        load(path, head_size=128)
    with pytest.raises(ValueError, match="num_heads must be a multiple of the file's num_kv_heads = 2, got 5"):
        load(path, num_heads=5)
    with pytest.raises(ValueError, match="granularity must be one of"):
        load(path, granularity="row")
    with pytest.raises(ValueError, match="k_format must be one of .*, got 'fp7'"):
        load(path, k_format="fp7")
    with pytest.raises(ValueError, match="v_format must be one of .*, got 'fp7'"):
        load(path, v_format="fp7")
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"num_layers must be at least 1, got {count}"):
            load(path, num_layers=count)
    for headroom in (0, -1.0, float("nan"), float("inf"), 1e300):
        with pytest.raises(ValueError, match="headroom must be a positive factor that fits fp32, got"):
            load(path, headroom=headroom)
        with pytest.raises(ValueError, match="headroom must be a positive factor that fits fp32, got"):
            ScalesFile.of(observer, headroom=headroom)
    with pytest.raises(TypeError, match=r"headroom must be a number, got '2' \(str\)"):
        load(path, headroom="2")
    assert load(str(path), headroom=np.float32(2)).headroom == 2


def test_scales_that_overflow_are_refused_by_layer_and_field(observer: AmaxObserver, tmp_path: Path) -> None:
    path = saved(observer, tmp_path, lambda f: f["layers"]["1"].update(v_amax=[1.0, 3e38]))
    assert load(path, headroom=100).layer(1).v_scale[1] == pytest.approx(3e38 * 100 / 448)
    with pytest.raises(ValueError, match=r"v_amax of layer 1 is up to 3e\+38: with a headroom of 1e\+06 no scale fits"):
        load(path, headroom=1e6).layer(1)
    assert load(path, headroom=1e6, k_format="bf16").layer(1).v_scale == 1


def test_scales_are_headroom_times_amax_over_the_format_s_largest(observer: AmaxObserver, tmp_path: Path) -> None:
    k_amax, v_amax = observer.amax(1)
    own = load(saved(observer, tmp_path), k_format="fp8", v_format="nvfp4", headroom=1.5).layer(1)
    torch.testing.assert_close(own.k_scale, k_amax.amax(-1) * 1.5 / 448)
    torch.testing.assert_close(own.v_scale, v_amax.amax(-1) * 1.5 / (6 * 448))
    assert own.q_mul is None and own.o_mul is None and own.k_write is own.k_scale
    tensor = load(saved(observer, tmp_path), k_format="e2m3", granularity="tensor").layer(1)
    torch.testing.assert_close(tensor.k_scale, k_amax.max().reshape(1) / 7.5)
    bf16 = load(saved(observer, tmp_path), k_format="bf16", granularity="channel").layer(0)
    assert bf16.k_scale.item() == 1 and bf16.q_mul is None


@pytest.mark.parametrize("name", FORMATS)
def test_full_scale_is_what_the_format_holds(name: str) -> None:
    fmt = get_format(name)
    x = torch.full((1, 16), full_scale(fmt) * 0.999)
    one = torch.ones(1)
    blocks = fmt.block_scales(x, one)
    value = fmt.decode(fmt.encode(x, one, blocks), blocks)
    assert value.isfinite().all() and (value / full_scale(fmt) - 1).abs().max() < 2**-3


def test_per_head_files_give_per_head_scales_only(observer: AmaxObserver, tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    ScalesFile.of(observer, per_channel=False).save(path)
    torch.testing.assert_close(load(path).layer(0).k_scale, observer.amax(0)[0].amax(-1) / 448)
    with pytest.raises(ValueError, match="k_amax of layer 0 is per head"):
        load(path, granularity="channel")
    assert load(path, k_format="bf16", granularity="channel").layer(0).q_mul is None


def test_channel_scales_are_folded_into_q_and_o(observer: AmaxObserver, tmp_path: Path) -> None:
    """Written with (h_k, d) scales and read with k_scale, q_mul, v_scale and o_mul, the oracle's attention is that over
    the values that the codes stand for, channel by channel."""
    own = load(saved(observer, tmp_path), k_format="e2m3", granularity="channel").layer(0)
    assert own.q_mul.shape == (6, D) and own.q_mul.max() == 1
    key, value = activations(0)
    fmt = get_format("e2m3")
    caches = [torch.zeros(3, 16, HEADS, fmt.row_width(D), dtype=torch.uint8) for _ in range(2)]
    slots = torch.arange(len(key))
    mjolnir.write_kv(key, value, *caches, slots, own.k_write, own.v_write, kv_format="e2m3")
    query = torch.randn(1, 6, D, generator=torch.Generator().manual_seed(3)).bfloat16()
    table, lens = torch.tensor([[0, 1, 2]]), torch.tensor([len(key)])
    out, _ = decode_attention_oracle(
        query, *caches, own.k_scale, own.v_scale, table, lens, q_len=1, softmax_scale=0.125, kv_format="e2m3",
        q_mul=own.q_mul, o_mul=own.o_mul,
    )  # fmt: skip
    k, v = (
        fmt.decode(cache.flatten(0, 1)[: len(key)]).double() * scale.double()
        for cache, scale in zip(caches, (own.k_write, own.v_write), strict=True)
    )
    k, v = (x.repeat_interleave(3, 1) for x in (k, v))
    weights = (torch.einsum("hd,thd->ht", query[0].double(), k) * 0.125).softmax(-1)
    torch.testing.assert_close(out[0], torch.einsum("ht,thd->hd", weights, v), rtol=1e-6, atol=1e-7)
    # Every channel uses the format's whole range, which is what they are for.
    largest = fmt.decode(caches[0].flatten(0, 1)[: len(key)]).abs().amax(0)
    assert largest.min() == 7.5


def entries(layers: int = LAYERS) -> dict[str, np.ndarray]:
    pairs = {layer: activations(layer) for layer in range(layers)}
    return {f"{s}.{i}": x.float().numpy() for i, pair in pairs.items() for s, x in zip("kv", pair, strict=True)}


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
def test_calibrate_reads_a_dump(tmp_path: Path, suffix: str, observer: AmaxObserver) -> None:
    dump, out = tmp_path / f"dump{suffix}", tmp_path / "scales.json"
    if suffix == ".npz":
        np.savez(dump, **entries())
    else:
        torch.save({name: torch.from_numpy(x).bfloat16() for name, x in entries().items()}, dump)
    result = invoke("calibrate", str(dump), "--out", str(out), "--headroom", "1.5")
    assert result.exit_code == 0, result.stderr
    assert "3 layers, 40 tokens" in result.output
    file = ScalesFile.load(out)
    assert file.headroom == 1.5 and file.source == f"dump{suffix}"
    assert file.layers[2].k_amax == observer.amax(2)[0].tolist()
    assert invoke("calibrate", str(dump), "--out", str(out), "--per", "head").exit_code == 0
    assert ScalesFile.load(out).layers[0].k_amax == observer.amax(0)[0].amax(-1).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.clear(), "holds no arrays"),
        (lambda e: e.pop("v.1"), r"has no v\.1"),
        (lambda e: e.update(w=np.zeros(1)), r"arrays are called k\.<layer> and v\.<layer>, got 'w'"),
        (lambda e: e.update({"k.0": np.zeros((40, 2), np.float32)}), r"k\.0 must be floats of shape .* \(40, 2\)"),
        (lambda e: e.update({"k.0": np.zeros((40, 2, 64), np.int32)}), r"k\.0 must be floats"),
        (lambda e: e.update({"k.00": e["k.0"]}), "dump.npz has k of layer 0 twice"),
        (lambda e: e.update({"v.2": np.full((40, 2, 64), np.inf)}), "value of layer 2 has values that are not"),
        (lambda e: e.update({"v.2": np.zeros((40, 2, 64), np.int8)}), r"v\.2 must be floats .*, got torch.int8 \(40"),
        (lambda e: e.update({"v.2": np.array(["text"])}), "dump.npz cannot be read as a .npz file"),
        (lambda e: e.update({"v.2": np.zeros((40, 2, 32), np.float32)}), "layer 2: value must have shape"),
    ],
)
def test_dumps_that_do_not_fit_are_refused_by_name(tmp_path: Path, change, message) -> None:
    arrays = entries()
    change(arrays)
    np.savez(tmp_path / "dump.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        observe_dump(tmp_path / "dump.npz")


def test_other_files_are_no_dumps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a dump is a .npz or a .pt file"):
        observe_dump(tmp_path / "dump.csv")
    torch.save([1], tmp_path / "dump.pt")
    with pytest.raises(ValueError, match="must hold a dict of tensors, got list"):
        observe_dump(tmp_path / "dump.pt")
    assert invoke("calibrate", str(tmp_path / "absent.npz")).exit_code == 2


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
def test_damaged_dumps_are_refused_by_name(tmp_path: Path, suffix: str) -> None:
    whole, dump = io.BytesIO(), tmp_path / f"dump{suffix}"
    if suffix == ".npz":
        np.savez(whole, **entries(1))
    else:
        torch.save({name: torch.from_numpy(x) for name, x in entries(1).items()}, whole)
    content = whole.getvalue()
    middle = len(content) // 2
    lone = io.BytesIO()
    np.save(lone, np.zeros(3))
    for damaged in (b"", b"text", content[:middle], content[middle:], content[:-4], lone.getvalue()):
        dump.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"dump{suffix} cannot be read as a {suffix} file"):
            observe_dump(str(dump))
        assert invoke("calibrate", str(dump), "--out", str(tmp_path / "scales.json")).exit_code == 2


@needs_model
def test_calibrate_runs_the_demo_s_model(tmp_path: Path) -> None:
    out = tmp_path / "scales.json"
    result = invoke("calibrate", "--tokens", "12", "--out", str(out), "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    file = ScalesFile.load(out)
    assert (len(file.layers), file.num_kv_heads, file.head_size, file.tokens) == (30, 3, 64, 12)
    assert min(min(row) for layer in file.layers.values() for row in layer.k_amax) > 0
    assert invoke("calibrate", "--tokens", "999999", "--out", str(out), "--device", "cpu").exit_code == 2
