"""Speed as ratios in one run: `python -m xmla.bench.run`."""
