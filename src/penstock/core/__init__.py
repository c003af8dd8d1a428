"""The binding to the native core (ctypes), and ``libpenstock.so``.  It may import only leaves."""
