"""The command line: one folder per group of commands.  A command parses options, calls lower layers, prints."""
