"""Slots: positions as places in the pool, windows, places in a batch."""

from xmla.core.ops.slots import map_slots, resolve_slots, split_batch, window_slots

OPS = (map_slots.OP, window_slots.OP, resolve_slots.OP, split_batch.OP)
