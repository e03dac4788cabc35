"""Words that several packages need, once: slots, keys, options, coefficient sets, messages and errors.

Open ``vocabulary`` first.
"""
