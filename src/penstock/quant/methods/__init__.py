"""Methods that choose the integers of a weight with data: weighted rounding and GPTQ, in numpy."""
