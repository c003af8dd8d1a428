"""Commands that set up this machine: doctor, completion."""
