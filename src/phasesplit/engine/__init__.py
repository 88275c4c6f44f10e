"""The embedded engine: reads a Llama-family model and runs it on the processor.

`checkpoint.open_checkpoint` is the door: it takes a GGUF file or a Hugging Face directory and gives the model's sizes,
its weights, its tokenizer and its chat template.
"""
