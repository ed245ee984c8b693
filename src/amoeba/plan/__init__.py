"""Will a model fit, and how fast will it be? Memory and speed of every way to run it, before anything is loaded."""
