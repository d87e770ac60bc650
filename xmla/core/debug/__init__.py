"""XMLA_CHECK, XMLA_SHADOW, reproducers."""
