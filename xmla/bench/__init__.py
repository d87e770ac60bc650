"""Speed as ratios in one run: `xmla bench`."""
