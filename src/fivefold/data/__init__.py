"""Text → tokens → samples. Every function here is deterministic and knows nothing of ranks.

source.py (files of text), tokenizer.py (byte-pair tokenizer), shards.py (tokenize once into shards),
store.py (read finished shards), permutation.py (order within an epoch), samples.py (what a step trains on).
"""
