"""Debugging of live calls: XMLA_CHECK, XMLA_SHADOW and the files that repeat a call. Nothing below imports it."""
