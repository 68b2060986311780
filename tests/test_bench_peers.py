"""Other kernels in the harness. Each stand-in has the signature of the real one, and computes attention, by the oracle,
from what it is given: a wrong table, length, layout or scale shows."""

from __future__ import annotations

import io
import lzma
import os
import sys
import tarfile
import threading
import types
import zipfile
from pathlib import Path

import pytest
import torch

from mjolnir.bench import peers
from mjolnir.bench.case import Case
from mjolnir.bench.peers import setup
from mjolnir.bench.peers.fa2 import FlashInferFa2
from mjolnir.bench.peers.fa3 import FlashAttention3
from mjolnir.bench.peers.modules import Modules
from mjolnir.bench.peers.sglang_triton import SglangTriton
from mjolnir.bench.peers.vllm_triton import VllmTriton
from mjolnir.bench.peers.xqa import Xqa
from mjolnir.bench.pool import KVPool
from mjolnir.bench.shapes import Shape
from mjolnir.reference import decode_attention_oracle

CPU = torch.device("cpu")
LENS = "1x200+1x3+1x64"
SHAPES = [
    Shape(4, 2, LENS, head_dim=64, page_size=16),
    Shape(4, 2, LENS, page_size=16),
    Shape(4, 2, LENS, page_size=16, layout="HND"),
    Shape(4, 2, LENS, page_size=16, q_len=3),
    Shape(4, 2, LENS, head_dim=64, page_size=16, kv_format="bf16"),
]


def attention(query, k_cache, v_cache, block_table, seq_lens, softmax_scale, causal=True):
    """bf16 O in the query's shape; (…, heads, d) queries of as many tokens a sequence."""
    tokens = query.reshape(-1, *query.shape[-2:])
    one = torch.ones(1)
    out, _ = decode_attention_oracle(
        tokens.float(), k_cache, v_cache, one, one, block_table, seq_lens, q_len=len(tokens) // len(seq_lens),
        softmax_scale=softmax_scale, causal=causal, kv_format="fp8" if k_cache.element_size() == 1 else "bf16",
    )  # fmt: skip
    return out.bfloat16().reshape(query.shape)


def as_pages(cache, layout):
    assert cache.is_contiguous()
    return cache if layout == "NHD" else cache.transpose(1, 2)


class Fa2Wrapper:
    def __init__(self, workspace, kv_layout, *, use_tensor_cores, backend):
        assert workspace.dtype == torch.uint8 and use_tensor_cores and backend == "fa2"
        self.layout = kv_layout

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, pos_encoding_mode,
        q_data_type, kv_data_type, o_data_type, sm_scale, q_len_per_req,
    ):  # fmt: skip
        assert (indptr.dtype, indices.dtype, last_page_len.dtype) == (torch.int32,) * 3
        assert pos_encoding_mode == "NONE" and q_data_type == o_data_type == torch.bfloat16
        self.kv_dtype, self.scale, self.q_len = kv_data_type, sm_scale, q_len_per_req
        self.heads = num_qo_heads, num_kv_heads, head_dim
        pages = indptr.diff().tolist()
        self.table = torch.nn.utils.rnn.pad_sequence(list(indices.split(pages)), batch_first=True, padding_value=-1)
        self.lens = (indptr.diff() - 1) * page_size + last_page_len

    def run(self, q, paged_kv_cache, *, out):
        k, v = (as_pages(cache, self.layout) for cache in paged_kv_cache)
        assert k.dtype == self.kv_dtype and (q.shape[1], k.shape[2], k.shape[3]) == self.heads
        assert len(q) == self.q_len * len(self.lens)
        out.copy_(attention(q, k, v, self.table, self.lens, self.scale))


def xqa(
    q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, num_kv_heads, page_size, *,
    kv_layout="NHD", q_seq_len=1, mask=None,
):  # fmt: skip
    assert (seq_lens.dtype, semaphores.dtype, workspace_buffer.dtype) == (torch.uint32, torch.uint32, torch.uint8)
    assert q.shape[1] == 1 and q.dim() == 4 + (q_seq_len > 1) and (mask is None) == (q_seq_len == 1)
    k, v = (as_pages(cache, kv_layout) for cache in (k_cache, v_cache))
    assert k.shape[1:3] == (page_size, num_kv_heads)
    output.copy_(attention(q, k, v, page_table, seq_lens.view(torch.int32)[:, 0], q.shape[-1] ** -0.5))


def fa3_fwd(
    q, k, v, *, seqused_k, page_table, q_descale, k_descale, v_descale, softmax_scale, is_causal, scheduler_metadata,
    num_splits,
):  # fmt: skip
    assert q.dtype == k.dtype and num_splits == 0
    assert (q_descale is None) == (q.dtype == torch.bfloat16) and is_causal == (q.shape[1] > 1)
    assert scheduler_metadata == (len(q), q.shape[1], *q.shape[2:3], *k.shape[2:])
    return attention(q, k, v, page_table, seqused_k, softmax_scale), None, None, None


def fa3_metadata(batch, q_len, max_len, heads, heads_kv, d, d_v, dtype, seqused_k, *, page_size, is_causal):
    assert d == d_v and max_len >= seqused_k.max() and max_len % page_size == 0 and len(seqused_k) == batch
    return batch, q_len, heads, heads_kv, d


def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size, block_table,
    softcap, q_descale, k_descale, v_descale, seq_threshold_3D, num_par_softmax_segments, softmax_segm_output,
    softmax_segm_max, softmax_segm_expsum, kv_quant_mode,
):  # fmt: skip
    assert q.dtype == k.dtype and window_size == (-1, -1) and softcap == 0 and causal
    assert (kv_quant_mode == 1) == (q.dtype == torch.float8_e4m3fn) == (q_descale is not None)
    assert cu_seqlens_q.tolist() == [i * max_seqlen_q for i in range(len(seqused_k) + 1)]
    assert max_seqlen_k == seqused_k.max() and k_descale.shape == v_descale.shape == (len(seqused_k), k.shape[2])
    assert softmax_segm_output.shape[1:] == (q.shape[1], num_par_softmax_segments, q.shape[2])
    assert softmax_segm_max.shape == softmax_segm_expsum.shape == softmax_segm_output.shape[:-1]
    assert len(softmax_segm_max) == seq_threshold_3D * max_seqlen_q
    out.copy_(attention(q, k, v, block_table, seqused_k, softmax_scale))


def decode_attention_fwd(
    q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits, max_kv_splits, sm_scale,
    k_scale, v_scale,
):  # fmt: skip
    assert num_kv_splits.tolist() == [max_kv_splits] * len(q) and (k_scale, v_scale) == (1.0, 1.0)
    assert attn_logits.shape == (*q.shape[:2], max_kv_splits, q.shape[2]) and attn_lse.shape == attn_logits.shape[:-1]
    pages = [k_or_v.unsqueeze(1) for k_or_v in (k_buffer, v_buffer)]  # of one token
    tables = list(kv_indices.split(kv_indptr.diff().tolist()))
    table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1)
    o.copy_(attention(q, *pages, table, kv_indptr.diff(), sm_scale))


class SplitsKernel:
    def __getitem__(self, grid):
        assert grid == (1,)
        return lambda splits, lens, batch, group, heads, heads_kv, most, sms, MAX_NUM_SEQ: splits.fill_(most)


class Spec:
    """A module's specification, whose build writes a file."""

    def __init__(
        self, folder: Path, name: str = "module", error: str | None = None, gate: threading.Event | None = None
    ):
        self.name, self.error, self.gate, self.builds = name, error, gate, 0
        self.aot_path, self.jit_library_path = folder / "aot" / name / "x.so", folder / "x.so"

    def build(self):
        self.builds += 1
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.error:
            raise RuntimeError(self.error)
        self.jit_library_path.write_text("built")


@pytest.fixture
def modules_there(monkeypatch):
    """Modules that are built, and stand-ins where the peers import from."""
    monkeypatch.setattr(Shape, "slots", property(lambda shape: 2))
    built = types.SimpleNamespace(wait=lambda spec: None)
    monkeypatch.setattr(FlashInferFa2, "module", lambda self, shape: None)
    monkeypatch.setattr(Xqa, "module", lambda self, shape: None)

    def mask(batch, q_len, device):
        return torch.zeros(batch, q_len, 2, dtype=torch.uint16)

    packages = {
        "flashinfer": dict(BatchDecodeWithPagedKVCacheWrapper=Fa2Wrapper),
        "flashinfer.xqa": dict(xqa=xqa),
        "flashinfer.decode": dict(_make_xqa_mtp_causal_mask=mask),
        "vllm.v1.attention.ops.triton_unified_attention": dict(unified_attention=unified_attention),
        "vllm.v1.kv_cache_interface": dict(KVQuantMode=types.SimpleNamespace(NONE=0, FP8_PER_TENSOR=1)),
        "sglang.kernels.ops.attention.decode_attention": dict(decode_attention_fwd=decode_attention_fwd),
        "sglang.kernels.ops.attention.metadata": dict(get_num_kv_splits_triton=SplitsKernel()),
        "triton": dict(next_power_of_2=lambda n: 1 << (n - 1).bit_length()),
    }
    for name, content in packages.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            module = ".".join(parts[:i])
            if module == name or module not in sys.modules or module not in packages:
                monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        vars(sys.modules[name]).update(content)
    ops = types.SimpleNamespace(fwd=fa3_fwd, get_scheduler_metadata=fa3_metadata)
    monkeypatch.setattr(torch.ops, "flash_attn_3", ops, raising=False)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    return [FlashInferFa2(built), Xqa(built), FlashAttention3(Path("x.so")), VllmTriton(), SglangTriton()]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_peer_gets_the_case_as_it_is(modules_there, shape):
    case = Case(shape, KVPool([shape], CPU))
    refused = []
    assert tuple(peer.name for peer in modules_there) == peers.NAMES
    for peer in modules_there:
        if peer.refuses(shape) is not None:
            refused.append(peer.name)
            continue
        call = peer.prepare(case).call
        outputs = [call(slot) for slot in range(2)]
        # bf16 O, and where the peer takes Q in fp8, Q's rounding too, which scores of a few units make a tenth of O.
        allowed = 0.15 if peer.name in ("fa3", "vllm-triton") and shape.kv_format == "fp8" else 2e-3
        for slot, out in enumerate(outputs):
            assert case.rel_err(out, slot) < allowed, peer.name
        assert case.rel_err(outputs[0], 1) > 0.5, "the slots' caches differ"
    expected = ["fa3"] if (shape.head_dim, shape.kv_format) == (64, "fp8") else []
    assert refused == expected + (["sglang-triton"] if shape.q_len > 1 or shape.layout == "HND" else [])


def test_pages_that_xqa_does_not_have_are_refused():
    assert Xqa(None).refuses(Shape(4, 2, "1x8K", page_size=256)) == "pages of 16, 32, 64, 128 tokens only"


# Modules


def test_modules_are_built_once_and_loaded_from_where_shipped_ones_lie(tmp_path):
    modules, spec = Modules(), Spec(tmp_path)
    modules.ask(spec)
    modules.wait(spec)
    modules.wait(spec)
    assert spec.builds == 1 and spec.aot_path.read_text() == "built"
    shipped = Modules()
    shipped.wait(spec)
    assert spec.builds == 1


def test_a_module_that_is_not_there_says_why(tmp_path):
    gate = threading.Event()
    modules, failing, slow = Modules(), Spec(tmp_path, "a", "nvcc: no such option"), Spec(tmp_path, "b", gate=gate)
    with pytest.raises(RuntimeError, match="module a cannot be built: nvcc: no such option"):
        modules.wait(failing)
    with pytest.raises(TimeoutError, match="module b was not built within 0 s"):
        modules.wait(slow, 0.01)
    gate.set()
    modules.wait(slow)


def test_builds_go_in_the_order_of_the_shapes_and_a_broken_peer_stops_none(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Modules, "ask", lambda self, spec: asked.append(spec))

    class Peer:
        def refuses(self, shape):
            return "no" if shape.q_len > 1 else None

        def module(self, shape):
            if shape.layout == "HND":
                raise ImportError("flashinfer")
            return shape.kv_format

    Modules().start(SHAPES[1:], [Peer()])
    assert asked == ["fp8", "bf16"]


# The folder


def make_folder(folder: Path) -> Path:
    def archive(name, files):
        with tarfile.open(folder / name, "w:xz") as tar:
            for path, text in files.items():
                info = tarfile.TarInfo(path)
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))

    folder.mkdir()
    archive(setup.FLASHINFER, {"flashinfer/__init__.py": "x = 1", "flashinfer/data/csrc/a.cu": "a"})
    archive("flashinfer_aot.tar.xz", {"aot/m/m.so": "m"})
    archive("flashinfer_aot_more.tar.xz", {"aot/n/n.so": "n"})
    with lzma.open(folder / setup.FA3, "wb") as library:
        library.write(b"fa3")
    with zipfile.ZipFile(folder / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a.py", "y = 2")
    (folder / "src" / "vllm").mkdir(parents=True)
    (folder / "src" / "vllm" / "__init__.py").write_text("z = 3")
    (folder / "src" / "vllm").chmod(0o555)
    return folder


def test_a_folder_is_unpacked_once(tmp_path, monkeypatch):
    folder, cache = make_folder(tmp_path / "peers"), tmp_path / "cache"
    site = setup.unpack(folder, cache)
    read = {path: (site.root / path).read_text() for path in (
        "packages/flashinfer/__init__.py", "packages/flashinfer/data/aot/m/m.so", "wheels/a.py", "src/vllm/__init__.py",
        "fa3/_C.abi3.so", "packages/flashinfer/data/aot/n/n.so",
    )}  # fmt: skip
    assert list(read.values()) == ["x = 1", "m", "y = 2", "z = 3", "fa3", "n"]
    assert os.access(site.root / "src" / "vllm", os.W_OK)
    monkeypatch.setattr(setup, "_extract", lambda *_: pytest.fail("unpacked again"))
    assert setup.unpack(folder, cache) == site
    monkeypatch.undo()
    (folder / "b-1-py3-none-any.whl").write_bytes((folder / "a-1-py3-none-any.whl").read_bytes())
    assert setup.unpack(folder, cache) != site, "another folder"


@pytest.mark.parametrize("name", [setup.FLASHINFER, setup.FA3])
def test_a_folder_that_lacks_a_file_is_refused(tmp_path, name):
    folder = make_folder(tmp_path / "peers")
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"peers must be a folder with {name} in it"):
        setup.unpack(folder, tmp_path / "cache")


def test_activation_leaves_what_is_installed_in_front_of_wheels(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", ["before"])
    monkeypatch.setattr(os, "environ", {"PATH": "p", "FLASHINFER_WORKSPACE_BASE": "mine"})
    toolkit = tmp_path / "cuda"
    for file in ("bin/nvcc", "include/cuda_runtime.h"):
        (toolkit / file).parent.mkdir(parents=True)
        (toolkit / file).touch()
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    site = setup.Site(tmp_path)
    setup.activate(site)
    assert sys.path == [str(site.sources), str(site.packages), "before", str(site.wheels)]
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == "mine"
    assert os.environ["PATH"] == f"{toolkit}/bin:p" and os.environ["LIBRARY_PATH"].startswith(str(tmp_path / "lib"))


def test_unknown_peers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="peer must be one of 'fa2', 'xqa', 'fa3', 'vllm-triton', 'sglang-triton'"):
        peers.load(tmp_path, SHAPES, ["fa4"])
