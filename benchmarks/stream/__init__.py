"""Streamed experts in the benchmark: `problem` says what is measured, `stores` where experts come from, `place` how a
token is run on this machine, `decode` and `lora` what is timed, `suite` runs it all."""
