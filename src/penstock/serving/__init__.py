"""The online service.  It may import every package but the command line; engines are submit, stream and abort."""
