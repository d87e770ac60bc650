"""DeepSeek-V3.2's model in Flax NNX, served and trained by xmla, without PyTorch and without transformers."""
