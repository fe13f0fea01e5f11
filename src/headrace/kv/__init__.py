"""KV memory: block pool, prefix index, and the manager that a scheduler asks. README.md draws who owns which block."""

from headrace.kv.hashing import CacheKey, HashChain
from headrace.kv.manager import BlockTable, KVManager

__all__ = ["BlockTable", "CacheKey", "HashChain", "KVManager"]
