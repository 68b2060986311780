"""Static scales of K and V from real activations: observed, kept in a JSON file, and given to a runner and a writer.

observe.py      amax per layer, KV head and channel
scales_file.py  the file: schema, checks
scales.py       from a file to the tensors that ``DecodeRunner.run`` and ``write_kv`` take
calibrate.py    what is observed: the demo's model over text, or a dump of K and V
"""
