"""Fine-tune a DeepSeek-V3.2 checkpoint by transformers' Trainer, its indexers with the rest: attention by xmla.

python examples/finetune_trainer.py [FOLDER]

FOLDER is that of a checkpoint; without it a small model has random weights. Trainer needs accelerate. Several GPUs take
a process each: torchrun --nproc-per-node 8 examples/finetune_trainer.py.
"""

import os
import sys
import tempfile

if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted
if "LOCAL_RANK" not in os.environ:  # on several GPUs Trainer would start threads, which autocast does not reach
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from xmla.demo.deepseek_v32 import build
from xmla.transformers import IndexerLoss


class TrainerOfIndexers(Trainer):
    """The model's loss plus that of its indexers, which the model's own does not reach."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        losses = IndexerLoss()
        inputs = inputs | {"use_cache": False, "indexer_loss": losses}
        loss, out = super().compute_loss(model, inputs, True, num_items_in_batch)
        # Trainer adds the losses of several batches up, of which each counts by its tokens.
        total = losses.added_to(loss, coeff=1 / self.args.gradient_accumulation_steps)
        return (total, out) if return_outputs else total


with tempfile.TemporaryDirectory() as scratch:
    small = len(sys.argv) == 1
    folder, tokens = (scratch, 16) if small else (sys.argv[1], 4096)
    if small:
        build("cpu", index_topk=8).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="xmla")
    texts = torch.randint(model.config.vocab_size, (4, tokens))
    arguments = TrainingArguments(
        scratch, max_steps=2, per_device_train_batch_size=1, gradient_accumulation_steps=2, bf16=True,
        activation_checkpointing=True, report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = TrainerOfIndexers(model, arguments, train_dataset=[{"input_ids": text, "labels": text} for text in texts])
    result = trainer.train()
    print(f"loss {result.training_loss:.3f}, {texts.numel() / result.metrics['train_runtime']:.1f} tokens/s")
