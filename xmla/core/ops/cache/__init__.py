"""Caches: what writes, reads, converts and compresses entries and keys."""

from xmla.core.ops.cache import (
    compress_kv,
    convert_indexer_cache,
    convert_mla_cache,
    pool_keys,
    read_indexer_cache,
    read_mla_cache,
    write_indexer_cache,
    write_mla_cache,
)

OPS = (
    write_mla_cache.OP,
    write_indexer_cache.OP,
    compress_kv.OP,
    pool_keys.OP,
    read_mla_cache.OP,
    read_indexer_cache.OP,
    convert_mla_cache.OP,
    convert_indexer_cache.OP,
)
