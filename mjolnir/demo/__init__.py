"""The demo: SmolLM2-135M-Instruct, decoding through DecodeRunner over a paged, quantised KV cache."""
