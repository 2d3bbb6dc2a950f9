"""Text → tokens → samples. Every function here is deterministic and knows nothing of ranks.

Read along: source.py (what is read), documents.py, conversations.py, ids.py (the forms of files), tokenizer.py
(byte-pair tokenizer), encode.py and shards.py (tokenize once into shards), store.py (read finished shards),
rows.py (shards → samples), permutation.py and samples.py (order within a source), turns.py and mixture.py (of
several: what a step trains on). check.py: what is refused before anything is read.
"""
