"""Streamed experts: `problem` says what is measured, `stores` where experts come from, `place` how a token is run here,
`decode` and `lora` what is timed, `run` runs it all."""
