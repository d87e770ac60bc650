"""SGLang with and without xmla: its engines, and plugins of them."""
