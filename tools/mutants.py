"""Takes the guards of the contract out one by one and runs the clause's test, which has to notice.

python -m tools.mutants [--only WORDS]       (make mutants)

Each mutant lives in a copy of the tree. Exit 1 if a test passes without its guard, or a guard is no longer found.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parent.parent
OPS = "xmla/core/ops"


@dataclass(frozen=True)
class Mutant:
    """`guard` in `file` becomes `without`; `test`, from tests/contract, narrowed by pytest's -k, fails then."""

    guard: str
    without: str
    file: str
    test: str
    keyword: str = ""


MUTANTS = (
    Mutant("tl.minimum(tl.load(lengths_ptr + token), num_keys)", "tl.load(lengths_ptr + token)",
           f"{OPS}/attention/sparse_mla/kernels.py", "test_2_lengths.py", "sparse_mla"),
    Mutant("tl.maximum(tl.minimum(tl.load(ends_ptr + row), num_columns), start)", "tl.load(ends_ptr + row)",
           f"{OPS}/selection/select_topk/kernels.py", "test_2_lengths.py", "select_topk"),
    Mutant("start = tl.minimum(tl.maximum(tl.load(starts_ptr + row), 0), num_columns)",
           "start = tl.load(starts_ptr + row)", f"{OPS}/selection/select_topk/kernels.py", "test_2_lengths.py",
           "select_topk"),
    Mutant("length = tl.maximum(tl.minimum(length, capacity), 0)  # [GROUP]", "length = length",
           f"{OPS}/indexer/indexer_topk_paged/kernels.py", "test_2_lengths.py", "indexer_topk_paged"),
    Mutant("start = tl.maximum(tl.load(starts_ptr + token), 0)", "start = tl.load(starts_ptr + token)",
           "xmla/core/lang/scores.py", "test_2_lengths.py", "indexer_scores-starts"),
    Mutant("ok = (slot >= 0) & (slot < num_slots)", "ok = slot < num_slots", f"{OPS}/attention/sparse_mla/kernels.py",
           "test_3_indices.py", "invalid"),
    Mutant("ok = (slot >= 0) & (slot < num_slots)", "ok = slot >= 0", f"{OPS}/attention/sparse_mla/kernels.py",
           "test_3_indices.py", "invalid"),
    Mutant("mask=offs_n < end, other=-1", "mask=offs_n < num_keys, other=-1", f"{OPS}/attention/sparse_mla/kernels.py",
           "test_4_unreferenced_memory.py", "broken_key"),
    Mutant("decode_e4m3(tl.load(cache + data[:, None] + offs_d, mask=mask, other=0))",
           "decode_e4m3(tl.load(cache + tl.where(ok, data, 0)[:, None] + offs_d))", "xmla/core/lang/entries.py",
           "test_4_unreferenced_memory.py", "sparse_mla"),
    Mutant("base = tl.where(new_maximum == float(\"-inf\"), 0.0, new_maximum)", "base = new_maximum",
           f"{OPS}/attention/sparse_mla/kernels.py", "test_4_unreferenced_memory.py", "empty_rows"),
    Mutant("mask = (head_ok & has_keys)[:, None] & latent_ok", "mask = head_ok[:, None] & latent_ok",
           f"{OPS}/attention/merge_attention/kernels.py", "test_1_every_kernel_ends.py", "merge_attention"),
    Mutant("return index.to(tl.int64) * STRIDE", "return index * STRIDE", "xmla/core/lang/offsets.py",
           "test_5_offsets.py", "neighbours and map_slots"),
    Mutant("if BOUND is None or BOUND * STRIDE >= 2**31:", "if BOUND is None:", "xmla/core/lang/offsets.py",
           "test_5_offsets.py", "far_offset"),
    Mutant("offset_of(offs_h[:, None], C.Q_STRIDE_H, HEADS)", "offs_h[:, None] * C.Q_STRIDE_H",
           f"{OPS}/attention/sparse_mla/kernels.py", "test_5_offsets.py", "sparse_mla-q-1"),
    Mutant("offset_of(position, EPILOGUE.COS_SIN_STRIDE)", "position * EPILOGUE.COS_SIN_STRIDE",
           f"{OPS}/attention/sparse_mla/kernels.py", "test_5_offsets.py", "sparse_mla-cos_sin"),
    Mutant("offset_of(offs_h, C.Q_STRIDE_H, C.HEADS)", "offs_h * C.Q_STRIDE_H",
           f"{OPS}/attention/sparse_mla/gluon_sm90/packed_consumers.py", "test_5_offsets.py", "far_offset"),
    Mutant("offset_of(offset, LAYOUT.data, PAGE_SIZE)", "offset * LAYOUT.data",
           f"{OPS}/attention/sparse_mla/gluon_sm90/common.py", "test_5_offsets.py", "far_offset"),
    Mutant("offset_of(offs_h, OUT_STRIDE_H, HEADS)", "offs_h * OUT_STRIDE_H",
           f"{OPS}/attention/merge_attention/kernels.py", "test_5_offsets.py", "merge_attention-outs-2"),
    Mutant("offset_of(part, value_stride_w)", "part * value_stride_w", f"{OPS}/selection/merge_topk/kernels.py",
           "test_5_offsets.py", "merge_topk-values-0"),
    Mutant("offset_of(head, QUERY.Q_STRIDE_I, HEADS)", "head * QUERY.Q_STRIDE_I",
           f"{OPS}/indexer/indexer_logits/kernels.py", "test_5_offsets.py", "indexer_logits-q8-1"),
    Mutant("offset_of(row_head, QUERY.Q_STRIDE_I, HEADS)", "row_head * QUERY.Q_STRIDE_I",
           f"{OPS}/indexer/indexer_logits_paged/kernels.py", "test_5_offsets.py", "indexer_logits_paged-q8-1"),
    Mutant("offset_of(row_head, QUERY.Q_STRIDE_I, HEADS)", "row_head * QUERY.Q_STRIDE_I",
           f"{OPS}/indexer/indexer_topk/kernels.py", "test_5_offsets.py", "far_offset"),
    Mutant("offset_of(offset, LAYOUT.data, PAGE_SIZE)", "offset * LAYOUT.data", "xmla/core/lang/entries.py",
           "test_5_offsets.py", "many_entries and v32"),
    Mutant("offset_of(slot // PAGE_SIZE, PAGE_STRIDE)", "slot // PAGE_SIZE * PAGE_STRIDE", "xmla/core/lang/entries.py",
           "test_5_offsets.py", "sparse_mla-cache-0"),
    Mutant("offset_of(offset, D, PAGE_SIZE)", "offset * D", "xmla/core/lang/indexer.py", "test_5_offsets.py",
           "many_indexer and fp8_d128"),
    Mutant("offset_of(offset, VALUES, PAGE_SIZE)", "offset * VALUES", "xmla/core/lang/indexer.py", "test_5_offsets.py",
           "many_indexer and fp8_d128"),
    Mutant("offset_of(offset, VALUE_BYTES, PAGE_SIZE)", "offset * VALUE_BYTES",
           f"{OPS}/cache/read_indexer_cache/kernels.py", "test_5_offsets.py", "many_indexer and fp8_d128"),
    Mutant("offset_of(position % PAGE_SIZE, 2 * WIDTH, PAGE_SIZE)", "position % PAGE_SIZE * (2 * WIDTH)",
           f"{OPS}/cache/compress_kv/kernels.py", "test_5_offsets.py", "many_states"),
    Mutant("if (page >= 0) & (page < state_pages):", "if page >= 0:", f"{OPS}/cache/compress_kv/kernels.py",
           "test_1_every_kernel_ends.py", "arbitrary and compress_kv"),
    Mutant("(entry * C.RATIO < num_angles)", "(entry * C.RATIO <= num_angles)", f"{OPS}/cache/compress_kv/kernels.py",
           "../test_ops.py", "compress_kv and angles"),
    Mutant("tl.where(page < num_pages, page, -1)", "page", f"{OPS}/cache/compress_kv/kernels.py",
           "../test_compression.py", "are_left_out"),
    Mutant("if before % parts == parts - 1:", "if before == 0:", f"{OPS}/cache/compress_kv/kernels.py",
           "../test_compression.py", "however_many"),
    Mutant("tl.store(counts_ptr + token, 0, mask=token < num_rows)", "tl.store(counts_ptr + token, 1)",
           f"{OPS}/cache/compress_kv/kernels.py", "../test_compression.py", "however_many"),
    Mutant("tl.minimum(first + chunk, num_tokens)", "first + 1", f"{OPS}/cache/compress_kv/kernels.py",
           "../test_compression.py", "however_many"),
    Mutant("max(cdiv(tokens, rows), 1)", "cdiv(tokens, rows)", f"{OPS}/cache/compress_kv/plan.py",
           "../test_compression.py", "however_many"),
    Mutant("(offs_w < WINDOW) & (position >= 0)", "(offs_w < WINDOW) & (position < 1 << 30)",
           f"{OPS}/cache/compress_kv/kernels.py", "test_4_unreferenced_memory.py", "states_outside"),
    Mutant("tl.minimum(visible.to(tl.int64), offset_of(width, PAGE_SIZE))", "visible.to(tl.int64)",
           f"{OPS}/slots/window_slots/kernels.py", "test_2_lengths.py", "window_slots"),
    Mutant("(slot < num_slots) & ", "", f"{OPS}/attention/sparse_mla/gluon_marks.py", "../core/test_gluon_cpu.py",
           "become_rows"),
    Mutant(" & (place < chunk)", "", f"{OPS}/attention/sparse_mla/gluon_marks.py", "../core/test_gluon_cpu.py",
           "become_rows"),
    Mutant("mask=key < end, other=-1", "mask=key < num_keys, other=-1", f"{OPS}/attention/sparse_mla/gluon_marks.py",
           "../core/test_gluon_cpu.py", "become_rows"),
    Mutant("gl.where(ok, place, MAP - 1)", "gl.where(ok, place, 0)", f"{OPS}/attention/sparse_mla/gluon_marks.py",
           "../core/test_gluon_cpu.py", "become_rows"),
    Mutant(" & (first_entry // 32 + at < num_words)", "", f"{OPS}/attention/sparse_mla/gluon_marks.py",
           "../core/test_gluon_cpu.py", "become_rows"),
    Mutant("token < num_tokens, num_keys, end", "token >= 0, num_keys, end",
           f"{OPS}/attention/sparse_mla/gluon_marks.py", "../core/test_gluon_cpu.py", "become_rows"),
    Mutant("mask=part < num_parts, other=0", "mask=part < 1, other=0", f"{OPS}/attention/sparse_mla/kernels.py",
           "../core/test_gluon_cpu.py", "become_rows"),
    Mutant("(entry % 32).to(tl.int32)", "(entry % 8).to(tl.int32)", f"{OPS}/attention/sparse_mla/kernels.py",
           "../core/test_gluon_cpu.py", "become_rows"),
    Mutant("mask=lane < K)", "mask=lane < BLOCK_K)", f"{OPS}/indexer/indexer_topk/kernels.py", "test_3_indices.py",
           "nothing_is_written and indexer_topk"),
    Mutant("splits = max(cdiv(keys, INVARIANT_SPLIT_KEYS), 1)",
           "splits = count_splits(tokens * head_blocks, keys, config, device)", f"{OPS}/attention/sparse_mla/splits.py",
           "test_7_same_bits.py", "batch_invariant"),
    Mutant("width = tl.where(request >= 0, table_width, 0)", "width = table_width", f"{OPS}/slots/map_slots/kernels.py",
           "test_1_every_kernel_ends.py", "arbitrary and map_slots"),
    Mutant("(request >= 0) & (request < num_requests)", "request >= 0", "xmla/core/lang/requests.py",
           "test_1_every_kernel_ends.py", "arbitrary and map_slots"),
    Mutant("inside = (index >= 0) & (index // PAGE_SIZE < width)", "inside = index // PAGE_SIZE < width",
           f"{OPS}/slots/map_slots/kernels.py", "test_1_every_kernel_ends.py", "arbitrary and map_slots"),
    Mutant("ok = (page >= 0) & (slot <= 0x7FFFFFFF)", "ok = page >= 0", f"{OPS}/slots/map_slots/kernels.py",
           "test_1_every_kernel_ends.py", "arbitrary and map_slots"),
    Mutant("mask=offs_k < num_keys)\n        count", "mask=offs_k >= 0)\n        count",
           f"{OPS}/slots/map_slots/kernels.py", "test_3_indices.py", "nothing_is_written and map_slots"),
    Mutant("ok = (slot >= 0) & (slot < num_slots)", "ok = slot >= 0", f"{OPS}/cache/read_indexer_cache/kernels.py",
           "test_1_every_kernel_ends.py", "arbitrary and read_indexer"),
    Mutant("ok = (slot >= 0) & (slot < num_slots)", "ok = slot < num_slots",
           f"{OPS}/cache/write_indexer_cache/kernels.py", "test_1_every_kernel_ends.py", "arbitrary and write_indexer"),
    Mutant("ok = (slot >= 0) & (slot < num_slots)", "ok = slot < num_slots", f"{OPS}/cache/read_mla_cache/kernels.py",
           "test_1_every_kernel_ends.py", "arbitrary and read_mla"),
    Mutant("ok = (slot >= 0) & (slot < num_slots)", "ok = slot >= 0", f"{OPS}/cache/write_mla_cache/kernels.py",
           "test_1_every_kernel_ends.py", "arbitrary and write_mla"),
    Mutant("end = tl.minimum(tl.maximum(end, 0), num_tokens)", "end = tl.maximum(end, 0)",
           f"{OPS}/slots/split_batch/kernels.py", "test_1_every_kernel_ends.py", "arbitrary and split_batch"),
    Mutant("ok = (page >= 0) & (page < num_pages)", "ok = page >= 0", "xmla/core/lang/indexer.py",
           "test_1_every_kernel_ends.py", "arbitrary and indexer_logits_paged"),
    Mutant("ok = (page >= 0) & (page < num_pages)", "ok = page < num_pages", "xmla/core/lang/indexer.py",
           "test_1_every_kernel_ends.py", "arbitrary and indexer_logits_paged"),
    Mutant("known = (request >= 0) & (request < num_requests)", "known = request < num_requests",
           f"{OPS}/indexer/indexer_logits_paged/kernels.py", "test_1_every_kernel_ends.py",
           "arbitrary and indexer_logits_paged"),
    Mutant('"cache" not in problem.written', "True", f"{OPS}/indexer/indexer_logits_paged/gluon_sm90/plan.py",
           "../core/test_plan.py", "two_launches_less"),
    Mutant("0 if problem.written.intersection(early) else device.overlap_limit", "device.overlap_limit",
           "xmla/core/plan/overlap.py", "../core/test_plan.py", "arguments_alone and select_blocks"),
    Mutant("self.written |= results.keys() | part.updates", "self.written |= part.updates",
           "xmla/core/op/composition.py", "../core/test_plan.py", "arguments_alone and select_blocks"),
    Mutant("self.written |= results.keys() | part.updates", "self.written |= results.keys()",
           "xmla/core/op/composition.py", "../core/test_plan.py", "two_launches_less"),
    Mutant("self.written = {*problem.written}", "self.written = set()", "xmla/core/op/composition.py",
           "../core/test_plan.py", "arguments_alone and dsa_attention"),
    Mutant(' if select.constants["PIECE"] else None', "", f"{OPS}/layer/dsa_attention/plan.py",
           "../core/test_choices.py", "also_map_them"),
    Mutant("if unaligned & anywhere:", "if False:", "xmla/core/compile/compiler.py", "../core/test_plan.py",
           "begin_on_16"),
    Mutant("if declared.type is int and number is not None and number < 1:", "if False:",
           "xmla/core/models/base.py", "../core/test_plan.py", "fields_of"),
    Mutant("for max_len in self.contexts():", "for max_len in self.max_lens:", "xmla/core/models/base.py",
           "../core/test_soak.py", "ModelConfig-17"),
    Mutant("(call.with_unaligned() for call in self.prefills(tokens, max_len))", "self.prefills(tokens, max_len)",
           "xmla/core/models/base.py", "../core/test_soak.py", "ModelConfig-17"),
    Mutant("for n in range(4 // gcd(entries, 4))", "for n in (0,)", "xmla/core/models/base.py", "../core/test_soak.py",
           "ModelConfigV4-17"),
    Mutant("k: int = 1024", "k: int = 512", "xmla/core/models/v4.py", "../core/test_model_v4.py", "own_sizes"),
    Mutant('"hy_v4", "num_attention_heads": 64', '"hy_v4", "num_attention_heads": 32',
           "xmla/core/models/published.py", "../test_checkpoints.py", "released_checkpoint"),
    Mutant("self.fields.get(name, absent) != only", "False", "xmla/core/models/checkpoint.py",
           "../test_checkpoints.py", "name_the_field"),
    Mutant("if ranks < 1 or heads % ranks:", "if False:", "xmla/core/models/checkpoint.py", "../test_checkpoints.py",
           "other_arguments"),
    Mutant("requests = sizes.requests * (sizes.new if new == 1 else 1)", "requests = sizes.requests",
           "xmla/vllm/warmup.py", "../test_vllm.py", "warmup_of_selections and few and H200"),
    Mutant("LEAST_HEADS = 32", "LEAST_HEADS = 1", "xmla/sglang/warmup.py", "../test_sglang.py",
           "warmup_of_selections and few and H200"),
    Mutant("compiled(specialization, device.arch, ordinal).run", "compiled(specialization, device.arch, ordinal)",
           "xmla/_warmup.py", "../test_settings.py", "loads_kernels"),
    Mutant("serving_begins(device.arch, ordinal)", "pass", "xmla/_warmup.py", "../test_settings.py", "loads_kernels"),
    Mutant("if in_a_call and late:", "if False:", "xmla/core/compile/compiler.py", "../test_settings.py",
           "after_warmup_is"),
    Mutant("length = tl.minimum(length, capacity)  # [GROUP]", "length = length",
           f"{OPS}/indexer/indexer_logits_paged/kernels.py", "test_2_lengths.py", "indexer_logits_paged"),
    Mutant("offset_of(request, table_stride)", "request * table_stride", f"{OPS}/slots/map_slots/kernels.py",
           "test_5_offsets.py", "map_slots-block_table"),
    Mutant("if size > LARGEST_SIZE:", "if False:", "xmla/core/op/memo.py", "test_5_offsets.py",
           "refused"),
    Mutant("if keys > LARGEST_SIZE:", "if False:", f"{OPS}/attention/sparse_mla/splits.py", "test_5_offsets.py",
           "positions_past"),
    Mutant("if not spec.has_stride(1, spec.shape[2]):", "if False:", "xmla/core/call/problem.py",
           "test_8_wrong_arguments.py"),
    Mutant("if spec.stride(0) % alignment:", "if False:", "xmla/core/call/problem.py", "test_8_wrong_arguments.py"),
    Mutant("if spec.alignment % alignment:", "if False:", "xmla/core/call/problem.py", "test_8_wrong_arguments.py"),
    Mutant("value if abs(value) >= SMALLEST_FACTOR else 0.0", "value or 0.0", "xmla/core/values/attribute.py",
           "../test_attributes.py", "no_normal"),
    Mutant("op.bind(specs, attrs, implementation)", "op.bind(specs, attrs)", "xmla/jax_api/_ops.py",
           "test_8_wrong_arguments.py", "composed"),
    Mutant("product(updated, read), combinations(rows, 2),", "product(updated, read),", "xmla/torch_api/_memory.py",
           "../test_memory.py", "lie_apart"),
    Mutant("if name != written and array is arrays[written] and is_ref(array):", "if False:", "xmla/jax_api/_ops.py",
           "../test_memory.py", "stands_once"),
    Mutant("if jax.typeof(gradient).sharding.spec == aval.sharding.spec:", "if True:", "xmla/jax_api/_primitive.py",
           "../test_parallel.py", "gradients_and_vmap"),
    Mutant("if isinstance(value, _private.RefView):", "if False:", "xmla/jax_api/_ops.py", "../test_jax.py",
           "view_of_a_ref"),
    Mutant("elif size == 0:", "elif False:", "xmla/jax_api/_primitive.py", "../test_jax_transforms.py", "over_none"),
    Mutant("if not -LARGEST_FACTOR <= value <= LARGEST_FACTOR:", "if False:", "xmla/core/values/attribute.py",
           "test_8_wrong_arguments.py", "test_message"),
    Mutant("np.where((indices < 0) | wide, -1, indices).astype(np.int32)", "indices.astype(np.int32)",
           "xmla/jax_api/_ops.py", "test_8_wrong_arguments.py", "64_bits"),
    Mutant('if tensor is not None and tensor.device.type not in ("cpu", "cuda"):', "if False:",
           "xmla/torch_api/_run.py", "test_8_wrong_arguments.py", "meta"),
    Mutant("if not all(isinstance(launch.kernel, InterpretedFunction) for launch in plan.launches):", "if False:",
           "xmla/core/compile/interpreter.py", "test_8_wrong_arguments.py", "without_the_interpreter"),
    Mutant("steps = (self.alignment, *(self.stride(axis)", "steps = (unit, *(self.stride(axis)",
           "xmla/core/values/spec.py", "test_8_wrong_arguments.py"),
    Mutant("all(step % unit == 0 for step in steps)", "self.alignment % unit == 0", "xmla/core/values/spec.py",
           "test_8_wrong_arguments.py"),
    Mutant("place = address % 16 if address", "place = 0 if address", "xmla/torch_api/_run.py",
           "test_8_wrong_arguments.py"),
    Mutant("if not spec.has_stride(-1, 1):", "if False:", "xmla/core/op/op.py",
           "test_8_wrong_arguments.py"),
    Mutant("if None not in (device, expected) and device != expected:", "if False:",
           "xmla/core/op/op.py", "test_8_wrong_arguments.py"),
    Mutant("packed = tl.load(packed_ptrs, mask=ok[:, None], other=0)", "packed = tl.load(packed_ptrs)",
           "xmla/core/lang/indexer.py", "test_1_every_kernel_ends.py", "indexer_logits_paged"),
    Mutant("if len(found) > 1:", "if False:", f"{OPS}/cache/read_indexer_cache/__init__.py",
           "test_8_wrong_arguments.py"),
    Mutant("if problem.specs[\"q8\"].dtype not in E4M3 and not keys_are_mxfp4(problem):", "if False:",
           "xmla/core/ops/indexer/shared.py", "test_8_wrong_arguments.py"),
    Mutant("if spec.dtype not in tensor.dtypes and not exact:", "if False:", "xmla/core/op/op.py",
           "test_8_wrong_arguments.py"),
    Mutant("right = (ok & (wrong == 0))[:, None]", "right = (wrong == 0)[:, None]",
           f"{OPS}/attention/sparse_mla/backward/kernels.py", "test_3_indices.py", "sparse_mla_backward"),
    Mutant("(slot >= 0) & (slot < num_slots)", "slot >= 0", "xmla/core/lang/slots.py", "test_3_indices.py",
           "sparse_mla_backward"),
    Mutant("tl.minimum(tl.load(lengths_ptr + token), num_keys)", "tl.load(lengths_ptr + token)",
           "xmla/core/lang/slots.py", "test_2_lengths.py", "sparse_mla_backward"),
    Mutant("mask = (references > 0)[:, None]", "mask = ok[:, None]",
           f"{OPS}/attention/sparse_mla/backward/kernels.py", "test_4_unreferenced_memory.py", "sparse_mla_backward"),
    Mutant("mask=mask & (high != 0)", "mask=mask & (high < -(1 << 30))",
           f"{OPS}/attention/sparse_mla/backward/kernels.py", "../core/test_sums.py", "exact"),
    Mutant("+ (low < 0).to(tl.int32)", "", f"{OPS}/attention/sparse_mla/backward/kernels.py", "../core/test_sums.py",
           "exact"),
    Mutant("((high << bits.to(tl.int64)) + low)", "low", f"{OPS}/attention/sparse_mla/backward/kernels.py",
           "../test_ops.py", "duplicates"),
    Mutant("bits = 31 - (", "bits = 32 - (", "xmla/core/lang/sums.py", "../core/test_sums.py", "parts"),
    Mutant("x + (1 << (bits - 1))", "x + (1 << bits)", "xmla/core/lang/sums.py", "../core/test_sums.py", "parts"),
    Mutant("greatest = tl.maximum(p, own)", "greatest = p", f"{OPS}/attention/sparse_mla/backward/kernels.py",
           "../test_training.py", "great_sink"),
    Mutant("tl.where(greatest <= MOST_PROBABLE, ds * C.SCALE, float(\"nan\"))", "ds * C.SCALE",
           f"{OPS}/attention/sparse_mla/backward/kernels.py", "../test_training.py", "another_calls"),
    Mutant("if not finite:", "if False:", f"{OPS}/attention/sparse_mla/backward/kernels.py", "../test_training.py",
           "overflows"),
    Mutant("(tl.max(ends) > CAPACITY // PIECE) | (total < k)", "total < k", f"{OPS}/selection/select_topk/kernels.py",
           "../test_ops.py", "select_topk"),
    Mutant("(tl.max(ends) > CAPACITY // PIECE) | (total < k)", "tl.max(ends) > CAPACITY // PIECE",
           f"{OPS}/selection/select_topk/kernels.py", "../test_ops.py", "select_topk"),
    Mutant("mask=lane < tl.cdiv(count, PIECE) * PIECE - count", "mask=lane < 0",
           f"{OPS}/selection/select_topk/kernels.py", "test_4_unreferenced_memory.py", "workspace and select_topk"),
    Mutant("if axes.setdefault(label, size) != size:", "if axes.setdefault(label, size) != size and False:",
           "xmla/core/op/op.py", "test_8_wrong_arguments.py"),
    Mutant("return entry, (entry >= 0) & (entry < num_entries)", "return entry, entry < num_entries",
           f"{OPS}/slots/resolve_slots/kernels.py", "test_1_every_kernel_ends.py", "arbitrary and resolve_slots"),
    Mutant("absent = ok & (place == -1 - column)", "absent = ok & (place < 0)", f"{OPS}/slots/resolve_slots/kernels.py",
           "../test_resolve_slots.py", "over_the_cache"),
    Mutant("given = (free == 1) & (rank < count)", "given = rank < count", f"{OPS}/slots/resolve_slots/kernels.py",
           "../test_resolve_slots.py", "over_the_cache"),
    Mutant("tl.store(places_row + block, -1, mask=block < count)", "tl.store(places_row + block, -1, mask=block < 0)",
           f"{OPS}/blocks/indexer_block_topk/kernels.py", "test_4_unreferenced_memory.py",
           "workspace and indexer_block_topk"),
    Mutant("mask=(column < width) & (ok == 0)", "mask=column < 0", f"{OPS}/blocks/indexer_block_topk/kernels.py",
           "test_4_unreferenced_memory.py", "workspace and indexer_block_topk"),
    Mutant("if tl.load(repeats_ptr + row) > 0:", "if tl.load(repeats_ptr + row) > 1:",
           f"{OPS}/blocks/indexer_block_topk/kernels.py", "../test_ops.py", "indexer_block_topk"),
    Mutant("known = (block >= 0) & (block < blocks_of", "known = (block < blocks_of",
           f"{OPS}/blocks/indexer_block_topk/kernels.py", "test_1_every_kernel_ends.py",
           "arbitrary and indexer_block_topk"),
    Mutant("if tl.max(missing) > 0:", "if tl.max(missing) > 1:", f"{OPS}/blocks/indexer_block_topk/kernels.py",
           "test_4_unreferenced_memory.py", "workspace and indexer_block_topk"),
    Mutant("tl.maximum(tl.load(starts_ptr + token, mask=token < num_tokens, other=0), 0)",
           "tl.load(starts_ptr + token, mask=token < num_tokens, other=0)",
           f"{OPS}/blocks/indexer_block_topk/kernels.py", "test_2_lengths.py", "indexer_block_topk"),
    Mutant(" & (offs_n[:, None] < row_end[None, :])", "", f"{OPS}/blocks/indexer_block_topk/kernels.py",
           "../test_ops.py", "indexer_block_topk"),
    Mutant("tl.store(out, scores, mask=place >= 0)", "tl.store(out, scores, mask=in_range)",
           f"{OPS}/blocks/indexer_block_topk/kernels.py", "../test_ops.py", "indexer_block_topk"),
    Mutant("offset_of(head, QUERY.Q_STRIDE_I, HEADS)", "head * QUERY.Q_STRIDE_I",
           f"{OPS}/blocks/indexer_block_topk/kernels.py", "test_5_offsets.py", "indexer_block_topk-q8-1"),
    Mutant("tl.store(named + place, 1, mask=place >= 0)", "tl.store(named + place, 0, mask=place >= 0)",
           f"{OPS}/slots/resolve_slots/kernels.py", "../test_resolve_slots.py", "over_the_cache"),
    Mutant("updated = jax.lax.optimization_barrier([arrays[name] for name in mutated])",
           "updated = [arrays[name] for name in mutated]", "xmla/jax_api/_run.py", "../test_jax_programs.py",
           "0.11.2-write_mla_cache"),
    Mutant("updated = jax.lax.optimization_barrier([arrays[name] for name in mutated])",
           "updated = [jax.lax.optimization_barrier(arrays[name]) for name in mutated]", "xmla/jax_api/_run.py",
           "../test_jax_programs.py", "0.12.0.1-resolve_slots"),
    Mutant("tuple(map(jax.lax.optimization_barrier, results))", "tuple(results)", "xmla/jax_api/_run.py",
           "../test_jax_programs.py", "0.12.0.1-sparse_mla_backward"),
    Mutant("tuple(map(jax.lax.optimization_barrier, results))", "jax.lax.optimization_barrier(tuple(results))",
           "xmla/jax_api/_run.py", "../test_jax_programs.py", "0.12.0.1-merge_attention"),
    Mutant("input_output_aliases=aliases)", "input_output_aliases=aliases, has_side_effect=True)",
           "xmla/jax_api/_launcher.py", "../test_jax_programs.py", "0.11.2-merge_attention"),
    Mutant("except (OSError, jax.errors.JaxRuntimeError) as error:", "except ZeroDivisionError as error:",
           "xmla/jax_api/_launcher.py", "../test_launcher.py", "does_not_load"),
    Mutant("except ImportError as error:  # a Python", "except ZeroDivisionError as error:  # a Python",
           "xmla/torch_api/_launch.py", "../test_torch_launcher.py", "does_not_load"),
    Mutant("if (!empty(mutated[j]) && addresses[mutated[i]] == addresses[mutated[j]]) {", "if (false) {",
           "xmla/jax_api/launcher.cc", "../test_launcher.py", "no_kernel_bears"),
    Mutant("if (addresses[mutated[i]] != addresses[operands.size() + updated[i]]) {", "if (false) {",
           "xmla/jax_api/launcher.cc", "../test_launcher.py", "no_kernel_bears"),
    Mutant("if problem[\"PLACES\"] < (most := columns(problem)):", "if (most := 0):",
           f"{OPS}/slots/resolve_slots/__init__.py", "test_8_wrong_arguments.py", "resolve_slots"),
    Mutant("return tensor if tensor.stride(-1) == 1 else tensor.contiguous()", "return tensor",
           "xmla/compat/_published.py", "../test_compat.py", "every_layout"),
    Mutant("if getattr(_thread, \"interprets\", False):", "if False:", "xmla/core/compile/interpreter.py",
           "../core/test_interpreter.py", "interrupts"),
    Mutant("_lock = threading.RLock()", "_lock = threading.Lock()", "xmla/core/compile/interpreter.py",
           "../core/test_interpreter.py", "interrupts"),
    Mutant("os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600", "os.O_WRONLY | os.O_CREAT, 0o666",
           "xmla/core/debug/reproducer.py", "../test_live.py", "nobody_elses"),
    Mutant("if (owner := os.fstat(inside).st_uid) != os.geteuid():", "if (owner := 0):",
           "xmla/core/debug/reproducer.py", "../test_live.py", "nobody_elses"),
    Mutant("require(nbytes <= len(content),", "require(True,", "xmla/core/debug/reproducer.py", "../test_live.py",
           "no_reproducer"),
    Mutant("if not _is_apart(tensor):", "if False:", "xmla/torch_api/_batching.py", "../test_torch.py", "vmap_refuses"),
    Mutant("None, CalledAs(here, names))", "None)", "xmla/compat/_published.py", "../test_compat.py", "every_layout"),
    Mutant("check=check,", "check=lambda problem: None,", f"{OPS}/layer/dsa_step/__init__.py",
           "test_8_wrong_arguments.py", "fake_tensors and dsa_step"),
    Mutant("        check_out(op, _result_specs(op, tensors, op.attributes(*attrs), implementation), out, "
           "tensors[0].device)", "        pass", "xmla/torch_api/_ops.py", "test_8_wrong_arguments.py", "test_out"),
    Mutant("        check_workspace(op, workspace, plan.workspace_bytes, tensors[0].device)", "        pass",
           "xmla/torch_api/_ops.py", "../test_front_ends.py", "a_plan_takes"),
    Mutant("        check_placed(op, results)", "        pass", "xmla/torch_api/_ops.py", "../test_front_ends.py",
           "a_plan_takes"),
    Mutant("stream = _private.current_stream(prepared.ordinal)", "stream = 0", "xmla/torch_api/_run.py",
           "../test_torch_launcher.py", "current_stream"),
    Mutant("if device.arch < 90 or device.arch >= 120 else None", "if device.arch < 90 else None",
           f"{OPS}/attention/sparse_mla/splits.py", "../core/test_choices.py", "serving_calls"),
    Mutant("(cdiv(tiles, splits) + 4)", "(cdiv(tiles, splits) + 40)", f"{OPS}/attention/sparse_mla/splits.py",
           "../core/test_choices.py", "serving_calls"),
    Mutant("return PortableConfig(64, 32, 8, 2)", "return PortableConfig(64, 64, 8, 2)",
           f"{OPS}/attention/sparse_mla/plan.py", "../core/test_choices.py", "serving_calls"),
    Mutant("right &= difference", "right = difference", "xmla/cli/verify.py", "../test_cli.py", "verify_notices"),
    Mutant("identical &= np.array_equal(one.view(np.uint8), other.view(np.uint8))", "pass", "xmla/cli/verify.py",
           "../test_cli.py", "verify_compares"),
    Mutant("good = count > 0 and not wrong", "good = not wrong", "xmla/cli/verify.py", "../test_cli.py",
           "by_an_implementation"),
    Mutant("error = max(error, largest_error(got, want))", "error = largest_error(got, want)", "xmla/cli/verify.py",
           "../test_cli.py", "verify_notices"),
    Mutant("lengths.clamp(max=min(block_table.shape[1] * cache.shape[1], INT32.max))", "lengths",
           "xmla/compat/deep_gemm.py", "../test_compat.py", "past_the_block_table"),
    Mutant(".clamp(0, num_kv_tokens)", ".clamp(max=num_kv_tokens)", "xmla/compat/deep_gemm.py", "../test_compat.py",
           "ranges_beyond_the_keys"),
    Mutant("main if alike else by_row.get(extra_k_cache.shape[-1])", "main", "xmla/compat/flash_mla.py",
           "../test_compat.py", "beside_its_compressed"),
    Mutant("(place >= counts) | (blocks >= counts)", "place >= counts", "xmla/compat/deep_gemm.py",
           "../test_compat.py", "cannot_have"),
    Mutant("bound = MAX_DRIFT_AFTER_SWAP if swapped else max(bound, ROUNDED_ONCE)", "bound = MAX_DRIFT_AFTER_SWAP",
           "xmla/core/debug/shadow.py", "../test_live.py", "drift_is_bounded"),
    Mutant("return scaled if drift.ok and not scaled.ok else drift", "return drift", "xmla/core/debug/shadow.py",
           "../test_live.py", "factor_that"),
    Mutant("factor = np.inf if swapped else (agreement or EXACT).factor", "factor = (agreement or EXACT).factor",
           "xmla/core/debug/shadow.py", "../test_live.py", "factor_that"),
    Mutant("if not np.array_equal(a[np.isinf(b)], b[np.isinf(b)]):", "if False:", "xmla/core/debug/shadow.py",
           "../test_live.py", "infinities"),
    Mutant("bad = (array < limit.low) | (array > limit.high)", "bad = array > limit.high", "xmla/core/debug/checks.py",
           "../test_settings.py", "check_reports"),
    Mutant("bad = (array < limit.low) | (array > limit.high)", "bad = array < limit.low", "xmla/core/debug/checks.py",
           "../test_settings.py", "check_reports"),
    Mutant("bad &= limit.where", "pass", "xmla/core/debug/checks.py", "../test_settings.py", "check_passes"),
    Mutant("if not getattr(self, name):", "if False:",
           "xmla/core/models/base.py", "../core/test_plan.py", "fields_of"),
    Mutant("if Version(triton.__version__) < Version(\"3.8\"):", "if False:", "xmla/core/compile/packs.py",
           "../test_cli.py", "every_process"),
    Mutant("if there.get(name) != here.get(name)", "if False", "xmla/core/compile/packs.py", "../test_cli.py",
           "something_else"),
    Mutant("for name in {**here, **there}", "for name in here", "xmla/core/compile/packs.py", "../test_cli.py",
           "something_else"),
    Mutant("elif name != MANIFEST:", "elif False:", "xmla/core/compile/packs.py", "../test_cli.py", "no_pack"),
    Mutant("[A-Za-z0-9_]+\\.[a-z]+", ".+", "xmla/core/compile/packs.py", "../test_cli.py", "no_pack"),
    Mutant(" or not is_whole(by_kind[\"cubin\"])", "", "xmla/core/compile/packs.py", "../test_cli.py", "no_pack"),
    Mutant("if layout.rope_in_value == rope_in_value or layout is PLAIN_V4)", ")", "xmla/core/models/base.py",
           "../test_cli.py", "rows_of_other_formats"),
    Mutant("splits = max(needed(count, LARGE_POOL) for count in range(1, min(tokens, SPLIT_TOKENS) + 1))",
           "splits = needed(min(tokens, SPLIT_TOKENS), LARGE_POOL)", "xmla/core/models/memory.py", "../test_vllm.py",
           "scratch_memory"),
    Mutant("if patch.releases.contains(release) and (current_platform.is_cuda() or not patch.on_gpu):",
           "if current_platform.is_cuda() or not patch.on_gpu:", "xmla/vllm/patches.py", "../test_vllm_patches.py",
           "that_are_for_it"),
    Mutant("if patch.releases.contains(release):", "if True:", "xmla/vllm/patches.py", "../test_vllm_patches.py",
           "one_model_or_mode"),
    Mutant("parallel.use_ubatching", "False", "xmla/vllm/refusals.py", "../test_vllm.py", "not_served_is_refused"),
    Mutant("if page * total > most:", "if False:", "xmla/vllm/gathered.py", "../test_vllm.py", "gathered_pages"),
    Mutant("lengths if row_starts is None else row_starts + lengths", "lengths", "xmla/sglang/indexer.py",
           "../test_sglang.py", "get_slots"),
    Mutant("if size * total > jnp.iinfo(array.dtype).max:", "if False:", "xmla/jax_api/_batching.py",
           "../test_jax_transforms.py", "vmap_refuses"),
    Mutant("jnp.where((array >= 0) & (array < total), array + first, -1)", "array + first",
           "xmla/jax_api/_batching.py", "../test_jax_transforms.py", "vmap"),
    Mutant("jnp.clip(array, 0, total) + first", "array + first", "xmla/jax_api/_batching.py",
           "../test_jax_transforms.py", "vmap"),
    Mutant("if dims[name] is None and axis in batched:", "if False:", "xmla/jax_api/_batching.py",
           "../test_jax_transforms.py", "vmap_refuses"),
    Mutant("if facts.global_scratch_size or facts.num_ctas != 1:", "if False:", "xmla/jax_api/_launcher.py",
           "../test_launcher.py", "scratch_memory"),
    Mutant(" and (parts or not op.sums_over_tokens)", "", "xmla/jax_api/_sharding.py", "../test_parallel.py",
           "gradients_and_vmap"),
    Mutant("over and not over & taken", "over", "xmla/jax_api/_sharding.py", "../test_parallel.py", "serves_one_axis"),
    Mutant("tl.exp2((greatest - top) * LOG2E)",
           "tl.exp2((tl.where(greatest == float(\"-inf\"), 0.0, greatest) - top) * LOG2E)",
           f"{OPS}/training/indexer_loss/kernels.py", "../test_magnitudes.py", "indexer"),
    Mutant("tl.where(size == 0.0, 0.0, delta)", "delta", f"{OPS}/attention/sparse_mla/backward/kernels.py",
           "test_4_unreferenced_memory.py", "without_effect and sparse_mla_backward"),
    Mutant("if len(place) > caches.tokens:", "if False:",
           "xmla/demo/in_jax/serving.py", "../test_flax_model.py", "hold"),
    Mutant("jnp.where(going & ~ends, place, -1)", "place",
           "xmla/demo/in_jax/serving.py", "../test_flax_model.py", "ended"),
    Mutant("if dense < layers:", "if False:",
           "xmla/demo/in_jax/model.py", "../test_flax_model.py", "another_model"),
    Mutant("if taken != expected:", "if False:",
           "xmla/core/op/op.py", "../test_attributes.py", "reference_takes"),
    Mutant("for name, op in _OPS.items() if name not in _INSTEAD}", "for name, op in _OPS.items()}",
           "xmla/core/registry.py", "../test_front_ends.py", "without_a_function"),
)  # fmt: skip


def copy_tree(folder: Path) -> None:
    """What tests run and read: the code as a copy, which may be changed."""
    for part in ("xmla", "tests", "tools"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for part in ("benchmarks", "docs", "examples", "README.md"):
        (folder / part).symlink_to(ROOT / part)


def run_tests(test: str, keyword: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += [f"tests/contract/{test}", *(["-k", keyword] if keyword else [])]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@cache
def passes_unchanged(test: str, keyword: str) -> bool:
    return run_tests(test, keyword, ROOT).returncode == 0


def run(mutant: Mutant) -> str:
    """What became of one mutant: the first test that noticed, or why none did."""
    if not passes_unchanged(mutant.test, mutant.keyword):
        return "FAILS UNCHANGED"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        file = folder / mutant.file
        text = file.read_text()
        if mutant.guard not in text:
            return "GUARD NOT FOUND"
        file.write_text(text.replace(mutant.guard, mutant.without))
        done = run_tests(mutant.test, mutant.keyword, folder)
        # An access outside of memory ends the process: noticed as well.
        if done.returncode < 0:
            return f"signal {-done.returncode}"
        if done.returncode != 1:
            return "SURVIVED" if done.returncode == 0 else f"PYTEST EXIT {done.returncode}"
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        return failed[0].split("::")[1].split(" - ")[0]


def main(only: Annotated[str, typer.Option(help="Mutants whose guard or file contains this.")] = "") -> None:
    """Run the mutants and print which test noticed each."""
    chosen = [mutant for mutant in MUTANTS if only in mutant.guard or only in mutant.file]
    table = Table("guard taken out", "file", "noticed by")
    survived = False
    for mutant in track(chosen, "mutants", transient=True):
        outcome = run(mutant)
        survived |= outcome.isupper()
        table.add_row(mutant.guard, mutant.file.removeprefix(f"{OPS}/"), outcome)
    Console(width=170).print(table)
    raise typer.Exit(code=int(survived))


if __name__ == "__main__":
    typer.run(main)
