"""Engines of vLLM and SGLang with and without xmla, over small models with the attention of released ones."""
