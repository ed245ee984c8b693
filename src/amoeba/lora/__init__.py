"""LoRA on experts: low-rank factors beside frozen expert weights, and PEFT folders in and out.

`factors` holds the six factors of one layer and their form in PEFT, `peft_files` reads and writes adapter folders.
Importing this package imports neither peft nor safetensors; reading and writing files needs safetensors alone.
"""
