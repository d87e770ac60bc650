"""The machine that a command runs on: its settings, facts about it, its files, and a call in each of its frameworks."""
