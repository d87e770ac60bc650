"""What is measured beside `xmla bench`: layers and models of frameworks, steps over several GPUs, peers in JAX.

Each module's first lines say how: `python -m benchmarks.<module>`, from the root of the tree. `engines` is vLLM's and
SGLang's.
"""
