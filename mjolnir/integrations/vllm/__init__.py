"""An attention backend of stock vLLM: what decodes runs on Mjolnir, everything else on a backend of vLLM's underneath.

```
plugin.py       the entry point in ``vllm.general_plugins``: names the backend to vLLM, imports nothing else
compat.py       everything that depends on vLLM's release
backend.py      the backend class, made from the fallback's
builder.py      per step: which part decodes, and its plan
impl.py         per layer: run the plan, or the fallback
decoder.py      the runners and plans of one metadata builder
steps.py        which requests of a step decode
eligibility.py  which layers can run here, and why not
counters.py     steps by path and reason
own_cache.py    nvfp4 and e2m3 caches: pages, scales, write, copies for prefill
log.py          its logger
shadow.py       every Nth decode step against the oracle
doctor.py       what would be used, for ``mjolnir doctor --vllm``
```
"""
