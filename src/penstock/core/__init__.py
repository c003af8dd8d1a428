"""The native core through ctypes.  It may import only leaves."""
