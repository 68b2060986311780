"""The codecs once more, in Triton: fp32 tiles to the packed words of a cache and back, code for code what ``encode``,
``block_scales`` and ``decode`` of the format give. codes.py rounds and packs, scales.py divides, rows.py loads and
stores.

Everything happens in 32-bit words. A tile [rows, D] is split into the elements that share a word, so that packing and
unpacking stay inside a thread.

NATIVE takes the conversion instructions of sm_89 and later, by inline PTX. Without it rounding is integer arithmetic,
which Triton's interpreter and older GPUs run. Both give the same codes. A NaN becomes one code, whatever its sign.
"""
