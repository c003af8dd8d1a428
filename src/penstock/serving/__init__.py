"""The online service.  It may import every package except the command line, and sees an engine only as submit, stream and abort."""
