"""What :class:`kvstore_vllm.KVStoreTier` is made of; nothing here needs vLLM or torch.

======== ==========================================================
options  the tier's entry in vLLM's configuration, and its namespace
region   vLLM's host memory, as slots for kvstore's engines
jobs     jobs of many chunks, each of which ends by itself
mover    look-ups, loads and stores of one tier, without I/O
======== ==========================================================
"""
