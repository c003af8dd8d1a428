"""The command line: one folder per group of commands.  Commands parse options, call the packages below, and print."""
