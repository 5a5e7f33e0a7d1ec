//! LoRA: which linears, and PEFT directories.
