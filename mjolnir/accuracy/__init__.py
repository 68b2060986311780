"""What a KV format costs in quality, on real activations: SmolLM2-135M over English text, teacher-forced.

setting.py   a setting of the cache: formats of K and V, granularity of scales, Q in fp8 or not
attend.py    attention over K and V that have been through the codec
evaluate.py  perplexity, KL, top-1 agreement, errors of O
study.py     a list of settings measured; JSON
stepwise.py  the same through pages, writer and runner, token by token, as a check
report.py    the table

docs/accuracy.md describes the method.
"""
