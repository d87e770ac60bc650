"""Attention on Hopper in Gluon. kernel.py is launched; it attends by few_heads.py, packed.py or plain.py."""
