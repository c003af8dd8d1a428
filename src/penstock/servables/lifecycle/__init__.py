"""Versions of servables: found, loaded, switched, drained."""
