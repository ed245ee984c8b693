"""`amoeba tune`: a bounded search for the best configuration of each kernel on the machine's own GPU."""
